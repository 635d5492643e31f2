//! The plan, tested one decision at a time, and in thousands of rounds on a model.

use super::*;

mod model;
mod scenarios;
