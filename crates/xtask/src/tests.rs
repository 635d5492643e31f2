//! Tests that check the whole repository, such as documents, chart, conformance and sizes of files.

mod tidy;
