//! Tests of all modules without I/O together: a model of a source, of a destination, and of mirrors that crash.

mod clusters;
mod model;
