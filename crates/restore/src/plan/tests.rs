//! The plan, tested one decision at a time, and in thousands of rounds on a model.

use api::cluster::EtcdClusterSpec;
use api::restore::{ChosenBackup, ReplacesStatus};

use super::*;
use crate::observed::FormerPod;
use crate::step::LATER;

mod model;
mod scenarios;
