//! Tests of single plans, and a model that runs thousands of reconciles.

use api::cluster::EtcdClusterSpec;
use api::restore::{ChosenBackup, ReplacesStatus};

use super::*;
use crate::plan::action::PROBLEM_POLL;
use crate::snapshot::OldPod;

mod model;
mod scenarios;
