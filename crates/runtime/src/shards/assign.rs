//! Decides which replica holds which shard. Every replica that observes the same Leases decides the same.

use std::cmp::Reverse;
use std::collections::BTreeSet;

/// The replica that should hold each shard.
///
/// - `holders`: for each shard, the holder of its Lease. `None` if the Lease is free.
/// - `replicas`: the replicas that run and are not shutting down.
///
/// Each replica gets the same number of shards, or one more. A replica keeps the shards that it holds, up to this
/// number. A new replica therefore moves only its own share.
pub(super) fn targets<'a>(
    holders: &[Option<&'a str>],
    replicas: &BTreeSet<&'a str>,
) -> Vec<Option<&'a str>> {
    let held = |replica: &str| holders.iter().filter(|one| **one == Some(replica)).count();
    let mut order: Vec<&'a str> = replicas.iter().copied().collect();
    // If the shards cannot be divided equally, the replicas that hold the most shards get one more, so that fewer
    // shards move.
    order.sort_by_key(|replica| (Reverse(held(replica)), *replica));
    let among = order.len().max(1);
    let (share, additional) = (holders.len() / among, holders.len() % among);
    let quota =
        |(rank, replica): (usize, &'a str)| (replica, share + usize::from(rank < additional));
    let mut left: Vec<(&'a str, usize)> = order.into_iter().enumerate().map(quota).collect();

    let mut targets = Vec::with_capacity(holders.len());
    for holder in holders {
        let keeps = left
            .iter_mut()
            .find(|(replica, left)| Some(*replica) == *holder && *left > 0);
        targets.push(keeps.map(|(replica, left)| {
            *left -= 1;
            *replica
        }));
    }
    for target in targets.iter_mut().filter(|target| target.is_none()) {
        if let Some((replica, left)) = left.iter_mut().find(|(_, left)| *left > 0) {
            *left -= 1;
            *target = Some(*replica);
        }
    }
    targets
}

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    use super::*;

    const NAMES: [&str; 6] = ["a", "b", "c", "d", "e", "f"];

    fn replicas(count: usize) -> BTreeSet<&'static str> {
        NAMES.into_iter().take(count).collect()
    }

    fn counts(holders: &[Option<&str>], replicas: &BTreeSet<&str>) -> Vec<usize> {
        let count = |replica: &&str| holders.iter().filter(|one| **one == Some(*replica)).count();
        replicas.iter().map(count).collect()
    }

    fn moved(before: &[Option<&str>], after: &[Option<&str>]) -> usize {
        let pairs = before.iter().zip(after);
        pairs.filter(|(before, after)| before != after).count()
    }

    #[test]
    fn single_replica_gets_all_shards() {
        assert_eq!(targets(&[None; 3], &replicas(1)), [Some("a"); 3]);
        assert_eq!(targets(&[None; 3], &replicas(0)), [None; 3]);
    }

    #[test]
    fn new_replica_takes_only_its_share_of_shards() {
        for shards in 1..=32 {
            let mut holders = vec![None; shards];
            for count in 1..=NAMES.len() {
                let after = targets(&holders, &replicas(count));
                let counts = counts(&after, &replicas(count));
                let (least, most) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
                assert!(most - least <= 1, "{shards} shards: {counts:?}");
                if count > 1 {
                    let new = counts[count - 1];
                    assert_eq!(moved(&holders, &after), new, "{shards} shards, {count}");
                }
                holders = after;
            }
        }
    }

    #[test]
    fn shards_of_ended_replica_are_assigned_to_remaining_replicas() {
        let holders = [Some("a"), Some("b"), None, Some("b"), None, Some("a")];
        let after = targets(&holders, &replicas(2));
        assert_eq!(moved(&holders, &after), 2, "{after:?}");
        assert_eq!(counts(&after, &replicas(2)), [3, 3]);
        // Replica `z` shuts down, but holds shard 0 until its reconciles have ended. Another replica is already the
        // target of this shard.
        let after = targets(&[Some("z"), Some("a"), Some("b"), None], &replicas(2));
        assert_eq!(counts(&after, &replicas(2)), [2, 2]);
        assert_eq!(after[1..3], [Some("a"), Some("b")]);
    }

    #[test]
    fn shard_assignment_is_stable_and_balanced_for_any_holders() {
        let mut random = StdRng::seed_from_u64(40);
        for _ in 0..2000 {
            let replicas = replicas(random.random_range(1..=NAMES.len()));
            let shards = random.random_range(1..=20);
            let one = |random: &mut StdRng| {
                let name = random.random_range(0..=NAMES.len());
                NAMES.get(name).copied()
            };
            let holders: Vec<_> = (0..shards).map(|_| one(&mut random)).collect();
            let after = targets(&holders, &replicas);
            let counts = counts(&after, &replicas);
            let (least, most) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
            assert!(most - least <= 1, "{holders:?} {replicas:?} {after:?}");
            assert!(after.iter().all(Option::is_some));
            assert_eq!(targets(&after, &replicas), after);
        }
    }
}
