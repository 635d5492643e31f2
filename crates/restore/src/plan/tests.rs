//! The plan, tested one decision at a time, and in thousands of rounds on a model.

use api::cluster::EtcdClusterSpec;
use api::restore::{ChosenBackup, ReplacesStatus};

use super::*;
use crate::plan::action::LATER;
use crate::snapshot::FormerPod;

mod model;
mod scenarios;
