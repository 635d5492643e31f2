//! Tests that check the whole repository: documents, chart, conformance and sizes of files.

mod tidy;
