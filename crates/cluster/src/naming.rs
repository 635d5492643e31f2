//! Names of new members and tokens of new clusters.
//!
//! The planner generates nothing: names are an input of the plan. The driver generates a seed for each observation, and
//! the same seed gives the same names. So two plans from one observation name the same members. A name is never used
//! twice (invariant 6), because no seed is used for two observations.

use api::names;
use sha2::{Digest, Sha256};

/// Unused names, by index. An index always gives the same name.
pub trait Names {
    /// The name of a member.
    fn member(&self, index: u64) -> String;
    /// The token of a cluster.
    fn token(&self, index: u64) -> String;
}

/// Names derived from a random seed.
#[derive(Clone, Debug)]
pub struct Seed {
    cluster: String,
    seed: [u8; 32],
}

impl Seed {
    /// Names for the cluster of this name. `seed` is random, and used for one observation.
    pub fn new(cluster: impl Into<String>, seed: [u8; 32]) -> Self {
        Self {
            cluster: cluster.into(),
            seed,
        }
    }

    /// The first `N` bytes of a hash. A hash has 32 bytes.
    fn derive<const N: usize>(&self, purpose: &[u8], index: u64) -> [u8; N] {
        let mut hash = Sha256::new();
        hash.update(self.seed);
        hash.update(purpose);
        hash.update(index.to_be_bytes());
        let bytes: [u8; 32] = hash.finalize().into();
        std::array::from_fn(|at| bytes[at])
    }
}

impl Names for Seed {
    fn member(&self, index: u64) -> String {
        names::member_name(&self.cluster, self.derive(b"member", index))
    }

    fn token(&self, index: u64) -> String {
        let number = u64::from_be_bytes(self.derive(b"token", index));
        format!("{}-{number:016x}", self.cluster)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn same_seed_gives_same_names() {
        let of = |seed| Seed::new("db", [seed; 32]);
        assert_eq!(of(1).member(0), of(1).member(0));
        assert_eq!(of(1).token(0), of(1).token(0));
        let other = [of(1).member(1), of(2).member(0), of(1).token(0)];
        assert!(!other.contains(&of(1).member(0)));
        assert_ne!(of(1).token(0), of(2).token(0));
    }

    #[test]
    fn derived_name_belongs_to_its_cluster() {
        let name = Seed::new("main-db", [7; 32]).member(3);
        assert_eq!(names::cluster_of_member(&name), Some("main-db"));
    }
}
