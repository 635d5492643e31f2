//! The library of `cargo xtask soak`: clients and watchers that record a history, the plan of the faults, and checks
//! of the history. The design follows etcd's robustness tests.

mod clients;
pub mod dice;
mod history;
mod linearity;
mod plan;
mod watchers;
mod watches;

pub use clients::{Clients, PREFIX, read_pairs};
pub use history::{Event, Operation, Pair, Recorder, Snapshot};
pub use linearity::{Verdict, linearity, lines};
pub use plan::{Change, Desired, Fault, Planner, Step};
pub use watchers::{WatchRecord, Watcher};
pub use watches::{check_snapshot, check_watches};
