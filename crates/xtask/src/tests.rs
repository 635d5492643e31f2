//! Tests of the whole repository, and of nothing in this crate.

mod tidy;
