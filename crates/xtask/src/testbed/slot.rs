//! Slots: each running testbed on the machine has a different slot number, which determines its IP addresses. A testbed
//! claims a slot with a file. The file contains the run folder of the testbed, and the PID and start time of the
//! claiming process.

use std::fs::{self, File};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use super::addresses::Slot;
use super::process::Identity;
use super::state::State;
use crate::{checkout, shell};

/// The maximum number of concurrent testbeds on one machine.
const SLOTS: u8 = 16;

#[derive(Debug, Serialize, Deserialize)]
struct Claim {
    run_folder: PathBuf,
    by: Identity,
}

impl Claim {
    /// True if the testbed of this claim is up or starting.
    fn is_held(&self) -> bool {
        self.by.is_alive()
            || State::read(&self.run_folder)
                .is_ok_and(|state| state.is_some_and(|state| state.is_alive()))
    }
}

/// Claims the first slot that no other testbed holds, and to whose networks the host has no routes.
pub(crate) fn claim(run_folder: &Path) -> Result<Slot> {
    let folder = checkout::slots_folder();
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let lock = File::create(folder.join("lock")).context("slots: lock file")?;
    lock.lock().context("slots: lock")?;
    let routes = routes()?;
    let by = Identity::own()?;
    let slot = choose(
        |slot| {
            held_by(&folder, slot)
                .filter(|claim| claim.run_folder != run_folder)
                .is_some_and(|claim| claim.is_held())
        },
        &routes,
    )?;
    let claim = Claim {
        run_folder: run_folder.to_path_buf(),
        by,
    };
    fs::write(claim_file(&folder, slot), serde_json::to_string(&claim)?).context("slots: claim")?;
    Ok(slot)
}

pub(crate) fn release(slot: Slot, run_folder: &Path) {
    let folder = checkout::slots_folder();
    if held_by(&folder, slot).is_some_and(|claim| claim.run_folder == run_folder) {
        // An error is ignored, because other testbeds ignore a claim whose process and testbed have both ended.
        let _ = fs::remove_file(claim_file(&folder, slot));
    }
}

/// Calls `act`, unless another testbed is up or starting. No testbed can start until `act` has returned, because `act`
/// changes resources that all testbeds share.
pub(crate) fn if_alone(run_folder: &Path, act: impl FnOnce()) {
    if_alone_in(&checkout::slots_folder(), run_folder, act);
}

fn if_alone_in(folder: &Path, run_folder: &Path, act: impl FnOnce()) {
    let Ok(lock) = File::create(folder.join("lock")) else {
        return;
    };
    if lock.lock().is_err() {
        return;
    }
    let others = (0..SLOTS)
        .filter_map(|slot| held_by(folder, Slot(slot)))
        .any(|claim| claim.run_folder != run_folder && claim.is_held());
    if !others {
        act();
    }
}

fn claim_file(folder: &Path, slot: Slot) -> PathBuf {
    folder.join(format!("{}.json", slot.0))
}

fn held_by(folder: &Path, slot: Slot) -> Option<Claim> {
    serde_json::from_str(&fs::read_to_string(claim_file(folder, slot)).ok()?).ok()
}

fn choose(taken: impl Fn(Slot) -> bool, routes: &[(Ipv4Addr, u8)]) -> Result<Slot> {
    let slots: Vec<Slot> = (0..SLOTS).map(Slot).collect();
    let free = |slot: &&Slot| {
        !taken(**slot)
            && !slot
                .networks()
                .iter()
                .any(|ours| routes.iter().any(|route| overlap(*ours, *route)))
    };
    match slots.iter().find(free) {
        Some(slot) => Ok(*slot),
        None => bail!(
            "no free slot for a testbed: each of the {SLOTS} slots is used by another checkout (see {}), or its networks \
             (10.88-10.103, 10.104-10.119, 10.120) have other routes (see `ip route`). \
             Take down the testbed of another checkout with `cargo xtask testbed down` there.",
            checkout::slots_folder().display()
        ),
    }
}

/// The networks to which the host has routes, without the default route.
fn routes() -> Result<Vec<(Ipv4Addr, u8)>> {
    Ok(parse_routes(&shell::output(
        Command::new("ip").args(["-4", "route", "show", "table", "all"]),
    )?))
}

fn parse_routes(text: &str) -> Vec<(Ipv4Addr, u8)> {
    text.lines()
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            let first = words.next()?;
            let network = if ["local", "broadcast", "unreachable", "blackhole", "prohibit"]
                .contains(&first)
            {
                words.next()?
            } else {
                first
            };
            let (address, length) = network.split_once('/').unwrap_or((network, "32"));
            Some((address.parse().ok()?, length.parse().ok()?))
        })
        .filter(|(_, length)| *length > 0)
        .collect()
}

fn overlap(a: (Ipv4Addr, u8), b: (Ipv4Addr, u8)) -> bool {
    let length = a.1.min(b.1);
    let mask = u32::MAX.checked_shl(32 - u32::from(length)).unwrap_or(0);
    u32::from(a.0) & mask == u32::from(b.0) & mask
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn testbed_claims_first_free_slot() {
        assert_eq!(choose(|_| false, &[]).unwrap(), Slot(0));
        assert_eq!(choose(|slot| slot.0 < 3, &[]).unwrap(), Slot(3));
    }

    #[test]
    fn slot_is_skipped_if_host_has_routes_to_its_networks() {
        let routes = parse_routes(
            "default via 10.0.0.1 dev eth0\n10.88.0.0/16 dev podman0 proto kernel\nlocal 10.105.0.1 dev x\n",
        );
        assert_eq!(routes.len(), 2);
        assert_eq!(choose(|_| false, &routes).unwrap(), Slot(2));
    }

    #[test]
    fn lack_of_testbed_slots_is_reported_with_remedy() {
        let error = choose(|_| false, &[(Ipv4Addr::new(10, 0, 0, 0), 8)]).unwrap_err();
        assert!(error.to_string().contains("testbed down"));
    }

    #[test]
    fn shared_resources_are_unchanged_while_another_testbed_is_up() {
        let folder = tempfile::tempdir().unwrap();
        let done = |run_folder: &str| {
            let mut done = false;
            if_alone_in(folder.path(), Path::new(run_folder), || done = true);
            done
        };
        assert!(done("/ours"));
        let claim = Claim {
            run_folder: "/theirs".into(),
            by: Identity::own().unwrap(),
        };
        let text = serde_json::to_string(&claim).unwrap();
        fs::write(claim_file(folder.path(), Slot(3)), text).unwrap();
        assert!(!done("/ours"));
        assert!(done("/theirs"));
    }

    #[test]
    fn slots_have_distinct_networks() {
        for a in 0..SLOTS {
            for b in 0..a {
                for ours in Slot(a).networks() {
                    assert!(
                        !Slot(b)
                            .networks()
                            .iter()
                            .any(|theirs| overlap(ours, *theirs)),
                        "{a} {b}"
                    );
                }
            }
        }
    }
}
