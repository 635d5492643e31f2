//! Tests of the whole repository.

mod tidy;
