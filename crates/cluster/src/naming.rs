//! Names of new members and tokens of new clusters.
//!
//! For each observation, the operator draws a random number and derives all names from it. Two plans for the same
//! observation therefore use the same names, and no name is used twice (invariant 6).

use api::names;
use sha2::{Digest, Sha256};

/// Generates unused names. The same index always gives the same name.
pub trait Names {
    /// A member name that was never used before, and that no other index gives.
    fn member(&self, index: u64) -> String;
    /// A cluster token that was never used before, and that no other index gives.
    fn token(&self, index: u64) -> String;
}

/// Derives member names and cluster tokens from a random seed.
#[derive(Clone, Debug)]
pub struct Seed {
    cluster: String,
    seed: [u8; 32],
}

impl Seed {
    /// Creates the names for the cluster with this name. `seed` must be random and used for one observation only.
    pub fn new(cluster: impl Into<String>, seed: [u8; 32]) -> Self {
        Self {
            cluster: cluster.into(),
            seed,
        }
    }

    /// The first `N` bytes (at most 32) of the SHA-256 hash of the seed, `purpose` and `index`.
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
    fn same_random_seed_gives_same_member_names() {
        let of = |seed| Seed::new("db", [seed; 32]);
        assert_eq!(of(1).member(0), of(1).member(0));
        assert_eq!(of(1).token(0), of(1).token(0));
        let other = [of(1).member(1), of(2).member(0), of(1).token(0)];
        assert!(!other.contains(&of(1).member(0)));
        assert_ne!(of(1).token(0), of(2).token(0));
    }

    #[test]
    fn generated_member_name_contains_cluster_name() {
        let name = Seed::new("main-db", [7; 32]).member(3);
        assert_eq!(names::cluster_of_member(&name), Some("main-db"));
    }
}
