//! The leases that give this process the right to reconcile.

use crate::lease::{Error, Lease};
use crate::shards::keeper::Keeper;

/// The right of this process to reconcile.
pub(crate) enum Duty {
    /// The Lease of an operator that is not divided into shards.
    Whole(Box<Lease>),
    /// The Leases of shards.
    Shards(Box<Keeper>),
}

impl Duty {
    /// Renews the leases. Returns the error when this process must end at once.
    pub(crate) async fn hold(&mut self) -> Error {
        match self {
            Self::Whole(lease) => lease.hold().await,
            Self::Shards(keeper) => keeper.hold().await,
        }
    }

    /// Releases the leases, after all reconciles have ended.
    pub(crate) async fn release(self) {
        match self {
            Self::Whole(lease) => lease.release().await,
            Self::Shards(keeper) => keeper.release().await,
        }
    }
}
