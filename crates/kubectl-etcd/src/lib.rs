//! `kubectl etcd`: a kubectl plugin for engineers on call, which shows and changes the clusters of the operators.
//!
//! The plugin uses only fields and annotations that the operators document, and makes no decisions in place of the
//! operators. The modules `access`, `etcdctl` and `commands` perform the I/O.

pub mod access;
pub mod changes;
pub mod cli;
pub mod commands;
pub mod console;
pub mod error;
pub mod etcdctl;
pub mod live;
pub mod members;
pub mod redact;
pub mod reference;
pub mod text;
pub mod view;
