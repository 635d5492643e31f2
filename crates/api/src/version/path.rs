//! Which version of etcd may follow which: one minor release at a time, from a floor release on, and back only where
//! etcd itself can go back. Pure.
//!
//! The sources are etcd's own: the upgrade guides (`content/en/docs/v3.6/upgrades/upgrade_3_6.md` and
//! `v3.7/upgrades/upgrade_3_7.md` in etcd-io/website), for 3.5.20 issue 19557 in etcd-io/etcd (the promotion of a
//! learner that 3.5.1 to 3.5.19 do not write to the store 3.6 reads), for 3.5.26 the post "zombie members" of December
//! 2025 (issue 20967: members long removed that come back with 3.6), and for the way back `allowedDowngradeVersion` in
//! `server/etcdserver/version/downgrade.go` of etcd 3.6.

use super::EtcdVersion;

/// The first release whose members can go back to the minor release before, by etcd's own downgrade.
const DOWNGRADES_FROM: (u64, u64) = (3, 6);

/// How a cluster gets from one version to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Within a minor release, in either direction.
    Within,
    /// To the next minor release.
    Up,
    /// To the minor release before, which etcd has to be told of first.
    Down,
}

/// What a minor release asks of the one before.
struct Floor {
    /// The minor release that asks.
    of: (u64, u64),
    /// The oldest release before it that may go on to it.
    patch: u64,
    /// Why.
    why: &'static str,
}

/// In their order: the first that is not met is named.
const FLOORS: [Floor; 3] = [
    Floor {
        of: (3, 6),
        patch: 20,
        why: "3.5.1 to 3.5.19 lose the promotion of a learner, and 3.6 would not start (etcd issue 19557)",
    },
    Floor {
        of: (3, 6),
        patch: 26,
        why: "before 3.5.26 members that were removed long ago may come back with 3.6 (etcd issue 20967)",
    },
    Floor {
        of: (3, 7),
        patch: 11,
        why: "3.6 before 3.6.11 may not work beside 3.7 (etcd's upgrade guide)",
    },
];

/// The way from the version a cluster runs to another one, or why there is none and which version comes in between.
///
/// # Errors
/// In words for the user.
pub fn way(from: &EtcdVersion, to: &EtcdVersion) -> Result<Way, String> {
    let ((major, minor), (to_major, to_minor)) = (from.minor(), to.minor());
    if major != to_major {
        return Err(format!("there is no way from etcd {from} to {to}"));
    }
    if to_minor == minor {
        return Ok(Way::Within);
    }
    if to_minor < minor {
        return back(from, to);
    }
    let floors = FLOORS.iter().filter(|floor| floor.of == (major, minor + 1));
    let patch = from.semver().patch;
    if let Some(floor) = floors.clone().find(|floor| patch < floor.patch) {
        let needed = floors.map(|floor| floor.patch).max().unwrap_or_default();
        let stop = format!("{major}.{minor}.{needed}");
        let why = floor.why;
        return Err(format!(
            "etcd {from} cannot go to {to} directly: {why}; set spec.version to {stop} or a later {major}.{minor} first"
        ));
    }
    if to_minor > minor + 1 {
        let next = minor + 1;
        let patch = FLOORS
            .iter()
            .filter(|floor| floor.of == (major, next + 1))
            .map(|floor| floor.patch)
            .max();
        let stop = match patch {
            Some(patch) => format!("{major}.{next}.{patch} or a later {major}.{next}"),
            None => format!("a {major}.{next} release"),
        };
        return Err(format!(
            "etcd goes up by one minor release at a time: from {from}, set spec.version to {stop} before {to}"
        ));
    }
    Ok(Way::Up)
}

fn back(from: &EtcdVersion, to: &EtcdVersion) -> Result<Way, String> {
    let (major, minor) = from.minor();
    let (_, to_minor) = to.minor();
    if from.minor() < DOWNGRADES_FROM {
        return Err(format!(
            "etcd before 3.6 cannot go back to an earlier minor release: set spec.version to {from} or later; a backup \
             can be restored into a new cluster of {to} if it was made by that version"
        ));
    }
    if (major, to_minor) < (DOWNGRADES_FROM.0, DOWNGRADES_FROM.1 - 1) {
        return Err(format!(
            "etcd {from} can go back to 3.5 at the lowest, not to {to}"
        ));
    }
    if to_minor + 1 < minor {
        let between = minor - 1;
        return Err(format!(
            "etcd goes back by one minor release at a time: from {from}, set spec.version to a {major}.{between} \
             release before {to}"
        ));
    }
    Ok(Way::Down)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn between(from: &str, to: &str) -> Result<Way, String> {
        way(
            &EtcdVersion::parse(from).unwrap(),
            &EtcdVersion::parse(to).unwrap(),
        )
    }

    #[test]
    fn a_patch_release_is_free_in_both_directions() {
        for (from, to) in [
            ("3.5.1", "3.5.35"),
            ("3.5.35", "3.5.1"),
            ("3.6.16", "3.6.16"),
        ] {
            assert_eq!(between(from, to), Ok(Way::Within), "{from} {to}");
        }
    }

    #[test]
    fn one_minor_release_at_a_time_from_the_floor_on() {
        for (from, to) in [
            ("3.4.23", "3.5.35"),
            ("3.5.26", "3.6.0"),
            ("3.5.35", "3.6.16"),
            ("3.6.11", "3.7.0"),
        ] {
            assert_eq!(between(from, to), Ok(Way::Up), "{from} {to}");
        }
    }

    #[test]
    fn what_is_refused_names_the_stop_over() {
        for (from, to, stop) in [
            ("3.4.23", "3.6.16", "3.5.26 or a later 3.5"),
            ("3.5.35", "3.7.3", "3.6.11 or a later 3.6"),
            ("3.4.23", "3.7.3", "3.5.26 or a later 3.5"),
            ("3.5.19", "3.6.16", "3.5.26 or a later 3.5"),
            ("3.5.25", "3.6.16", "3.5.26 or a later 3.5"),
            ("3.6.10", "3.7.3", "3.6.11 or a later 3.6"),
            ("3.2.13", "3.4.23", "a 3.3 release"),
        ] {
            let why = between(from, to).unwrap_err();
            assert!(why.contains(stop), "{from} {to}: {why}");
        }
    }

    #[test]
    fn the_way_back_is_one_minor_release_and_ends_at_3_5() {
        assert_eq!(between("3.6.16", "3.5.35"), Ok(Way::Down));
        assert_eq!(between("3.7.3", "3.6.16"), Ok(Way::Down));
        for (from, to, says) in [
            ("3.5.35", "3.4.23", "cannot go back"),
            ("3.6.16", "3.4.23", "3.5 at the lowest"),
            ("3.7.3", "3.5.35", "a 3.6 release"),
            ("4.0.0", "3.7.3", "no way"),
        ] {
            let why = between(from, to).unwrap_err();
            assert!(why.contains(says), "{from} {to}: {why}");
        }
    }
}
