//! The allowed changes of the etcd version: upgrades by one minor release from a minimum patch release, and the
//! downgrades that etcd supports.
//!
//! Sources:
//! - Upgrade guides: `content/en/docs/v3.6/upgrades/upgrade_3_6.md` and `v3.7/upgrades/upgrade_3_7.md` in
//!   etcd-io/website.
//! - 3.5.20: issue 19557 in etcd-io/etcd. 3.5.1 to 3.5.19 do not store the promotion of a learner where 3.6 reads it.
//! - 3.5.26: the post "zombie members" of December 2025 (issue 20967). After an upgrade from an earlier patch release
//!   to 3.6, removed members can reappear.
//! - Downgrades: `allowedDowngradeVersion` in `server/etcdserver/version/downgrade.go` of etcd 3.6.

use std::fmt;

use super::EtcdVersion;

/// The first minor release from which etcd can downgrade to the previous minor release.
const DOWNGRADES_FROM: (u64, u64) = (3, 6);

/// The direction of a change of the version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UpgradeDirection {
    /// A change of the patch release, in either direction.
    Within,
    /// To the next minor release.
    Up,
    /// To the previous minor release, after etcd has enabled the downgrade.
    Down,
}

/// The minimum patch release from which etcd can be upgraded to the next minor release, and to which the next minor
/// release can be downgraded.
struct Floor {
    /// The minor release after the upgrade.
    of: (u64, u64),
    /// The minimum patch release before the upgrade.
    patch: u64,
    /// The reason, for the error message.
    why: &'static str,
}

/// The entries of one minor release are in the order of `patch`, because the error names the first entry whose minimum
/// is not met.
const FLOORS: [Floor; 3] = [
    Floor {
        of: (3, 6),
        patch: 20,
        why: "etcd 3.5.1 to 3.5.19 do not store the promotion of a learner, so etcd 3.6 would not start (etcd issue \
              19557)",
    },
    Floor {
        of: (3, 6),
        patch: 26,
        why: "after an upgrade from a release before 3.5.26, members that were removed long ago can reappear (etcd \
              issue 20967)",
    },
    Floor {
        of: (3, 7),
        patch: 11,
        why: "etcd 3.6 releases before 3.6.11 may not work in one cluster with etcd 3.7 (etcd's upgrade guide)",
    },
];

/// The direction of the change between two versions.
///
/// # Errors
/// Fails if the change is not allowed. The error contains the cause and the version to set first.
pub fn direction(from: &EtcdVersion, to: &EtcdVersion) -> Result<UpgradeDirection, String> {
    let ((major, minor), (to_major, to_minor)) = (from.minor(), to.minor());
    if major != to_major {
        return Err(format!(
            "etcd {from} cannot change to {to}: set spec.version to a {major}.x release"
        ));
    }
    if to_minor == minor {
        return Ok(UpgradeDirection::Within);
    }
    if to_minor < minor {
        return downgrade(from, to);
    }
    let mut floors = FLOORS.iter().filter(|floor| floor.of == (major, minor + 1));
    let patch = from.semver().patch;
    if let Some(unmet) = floors.find(|floor| patch < floor.patch) {
        let stop = format!("{major}.{minor}.{}", floor(from.minor()));
        let why = unmet.why;
        return Err(format!(
            "etcd {from} cannot be upgraded to {to} directly, because {why}: set spec.version to {stop} or a later {major}.{minor} first"
        ));
    }
    if to_minor > minor + 1 {
        let next = minor + 1;
        let stop = match floor((major, next)) {
            0 => format!("a {major}.{next} release"),
            patch => format!("{major}.{next}.{patch} or a later {major}.{next}"),
        };
        return Err(format!(
            "etcd upgrades by one minor release at a time: set spec.version first to {stop}, and to {to} after that \
             upgrade"
        ));
    }
    Ok(UpgradeDirection::Up)
}

/// A version that a user must set before the target version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stop {
    /// The version to set.
    pub version: EtcdVersion,
    /// True if later patch releases of the same minor release are also possible.
    pub or_later: bool,
}

impl fmt::Display for Stop {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.version.fmt(formatter)?;
        formatter.write_str(if self.or_later { " or later" } else { "" })
    }
}

/// The versions to set one by one, so that each change is allowed. The last version is `to`.
///
/// # Errors
/// Fails if no sequence of changes leads to `to`. The error contains the cause and a possible version.
pub fn stops(from: &EtcdVersion, to: &EtcdVersion) -> Result<Vec<Stop>, String> {
    let mut path = Vec::new();
    let mut at = from.clone();
    loop {
        let Err(refused) = direction(&at, to) else {
            path.push(Stop {
                version: to.clone(),
                or_later: false,
            });
            return Ok(path);
        };
        let Some(next) = next_stop(&at, to).filter(|next| direction(&at, next).is_ok()) else {
            // The error about the whole change from `from` to `to` is clearer than `refused`, which is about the change
            // from `at`.
            return Err(direction(from, to).err().unwrap_or(refused));
        };
        path.push(Stop {
            version: next.clone(),
            or_later: true,
        });
        at = next;
    }
}

/// The first patch release of a minor release that can run in one cluster with the next minor release.
fn floor((major, minor): (u64, u64)) -> u64 {
    let floors = FLOORS.iter().filter(|floor| floor.of == (major, minor + 1));
    floors.map(|floor| floor.patch).max().unwrap_or_default()
}

/// The version to set between `at` and `to`: the required patch release of the same minor release as `at`, or a release
/// of the adjacent minor release.
fn next_stop(at: &EtcdVersion, to: &EtcdVersion) -> Option<EtcdVersion> {
    let ((major, minor), (to_major, to_minor)) = (at.minor(), to.minor());
    if major != to_major {
        return None;
    }
    let next = if to_minor < minor {
        minor - 1
    } else if at.semver().patch < floor(at.minor()) {
        minor
    } else {
        minor + 1
    };
    Some(EtcdVersion::release(major, next, floor((major, next))))
}

fn downgrade(from: &EtcdVersion, to: &EtcdVersion) -> Result<UpgradeDirection, String> {
    let (major, minor) = from.minor();
    let (_, to_minor) = to.minor();
    if from.minor() < DOWNGRADES_FROM {
        return Err(format!(
            "etcd before 3.6 cannot be downgraded to an earlier minor release: set spec.version to {from} or later; a backup \
             made by {to} can be restored into a new cluster of that version"
        ));
    }
    if (major, to_minor) < (DOWNGRADES_FROM.0, DOWNGRADES_FROM.1 - 1) {
        return Err(format!(
            "etcd {from} cannot be downgraded to {to}: set spec.version to 3.5 or later"
        ));
    }
    if to_minor + 1 < minor {
        let between = minor - 1;
        return Err(format!(
            "etcd downgrades by one minor release at a time: set spec.version first to a {major}.{between} release, \
             and to {to} after that downgrade"
        ));
    }
    let needed = floor(to.minor());
    if to.semver().patch < needed {
        return Err(format!(
            "etcd {from} cannot be downgraded to {to}, because both releases run in one cluster during a downgrade: set \
             spec.version to {major}.{to_minor}.{needed} or a later {major}.{to_minor}"
        ));
    }
    Ok(UpgradeDirection::Down)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn between(from: &str, to: &str) -> Result<UpgradeDirection, String> {
        direction(
            &EtcdVersion::parse(from).unwrap(),
            &EtcdVersion::parse(to).unwrap(),
        )
    }

    #[test]
    fn patch_release_can_change_in_both_directions() {
        for (from, to) in [
            ("3.5.1", "3.5.35"),
            ("3.5.35", "3.5.1"),
            ("3.6.16", "3.6.16"),
        ] {
            assert_eq!(
                between(from, to),
                Ok(UpgradeDirection::Within),
                "{from} {to}"
            );
        }
    }

    #[test]
    fn upgrade_to_next_minor_is_allowed_from_minimum_patch() {
        for (from, to) in [
            ("3.4.23", "3.5.35"),
            ("3.5.26", "3.6.0"),
            ("3.5.35", "3.6.16"),
            ("3.6.11", "3.7.0"),
        ] {
            assert_eq!(between(from, to), Ok(UpgradeDirection::Up), "{from} {to}");
        }
    }

    #[test]
    fn rejected_upgrade_reports_intermediate_version() {
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
    fn downgrade_is_allowed_by_one_minor_down_to_3_5() {
        assert_eq!(between("3.6.16", "3.5.35"), Ok(UpgradeDirection::Down));
        assert_eq!(between("3.7.3", "3.6.16"), Ok(UpgradeDirection::Down));
        for (from, to, expected) in [
            ("3.5.35", "3.4.23", "cannot be downgraded"),
            ("3.6.16", "3.4.23", "3.5 or later"),
            ("3.7.3", "3.5.35", "a 3.6 release"),
            ("3.6.16", "3.5.25", "3.5.26 or a later 3.5"),
            ("3.7.3", "3.6.10", "3.6.11 or a later 3.6"),
            ("4.0.0", "3.7.3", "cannot change"),
        ] {
            let why = between(from, to).unwrap_err();
            assert!(why.contains(expected), "{from} {to}: {why}");
        }
    }

    fn path(from: &str, to: &str) -> Result<Vec<String>, String> {
        let parse = |text| EtcdVersion::parse(text).unwrap();
        let stops = stops(&parse(from), &parse(to))?;
        Ok(stops.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn upgrade_path_stops_at_each_minor_release() {
        for (from, to, expected) in [
            ("3.6.16", "3.6.11", &["3.6.11"][..]),
            ("3.5.35", "3.6.16", &["3.6.16"]),
            ("3.5.20", "3.6.16", &["3.5.26 or later", "3.6.16"]),
            ("3.5.35", "3.7.3", &["3.6.11 or later", "3.7.3"]),
            (
                "3.4.23",
                "3.7.3",
                &["3.5.26 or later", "3.6.11 or later", "3.7.3"],
            ),
            ("3.7.3", "3.5.35", &["3.6.11 or later", "3.5.35"]),
        ] {
            assert_eq!(path(from, to).unwrap(), expected, "{from} {to}");
        }
    }

    #[test]
    fn impossible_upgrade_path_reports_same_error_as_direct_change() {
        for (from, to) in [
            ("3.5.35", "3.4.23"),
            ("3.7.3", "3.4.23"),
            ("3.6.1", "4.0.0"),
        ] {
            assert_eq!(path(from, to).err(), between(from, to).err(), "{from} {to}");
        }
    }
}
