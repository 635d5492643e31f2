//! Compares the data of a seed with the recorded backup. Performs no I/O.
//!
//! A pod may have another backup than the recorded one. For example, an operator process was suspended, and created
//! the pod after the record had changed. The arguments of a pod name the backup that it downloads. The report of a pod
//! describes the data on its volume, which an earlier pod may have downloaded.

use api::EtcdRestore;
use api::restore::ChosenBackup;
use api::storage::StorageBlock;
use k8s_openapi::api::core::v1::Pod;
use member::{FETCH, Origin};

use crate::plan::choice::{self, ENCRYPTION, REPLAY_REVISION, SHA256, SOURCE};
use crate::snapshot::{OtherBackup, PodFacts};

/// The argument with the number by which the restore raises the revision.
const BUMP: &str = "--bump-revision=";

pub(crate) struct FetchArguments<'a> {
    pub(crate) source: StorageBlock,
    /// The storage block as JSON, exactly as in the arguments of the pod.
    pub(crate) text: &'a str,
    /// The SHA-256 that the snapshot must have.
    pub(crate) sha256: Option<&'a str>,
    /// The Secret with the keys of an encrypted backup.
    pub(crate) encryption_secret: Option<&'a str>,
    /// The number by which the restore raises the revision. 0 without this argument.
    pub(crate) bump_revision: i64,
    /// The revision at which the replay of recorded changes ends. `None` without a replay.
    pub(crate) replay_revision: Option<i64>,
}

impl<'a> FetchArguments<'a> {
    /// Reads the arguments of a pod. `None` if they are invalid.
    pub(crate) fn of(pod: &'a Pod) -> Option<Self> {
        let text = argument(pod, FETCH, SOURCE)?;
        let bump = argument(pod, FETCH, BUMP);
        let replay = argument(pod, FETCH, REPLAY_REVISION);
        Some(Self {
            source: serde_json::from_str(text).ok()?,
            text,
            sha256: argument(pod, FETCH, SHA256),
            encryption_secret: argument(pod, FETCH, ENCRYPTION),
            bump_revision: bump.map_or(Some(0), |by| by.parse().ok())?,
            replay_revision: match replay {
                Some(revision) => Some(revision.parse().ok()?),
                None => None,
            },
        })
    }

    fn has_source_of(&self, chosen: &ChosenBackup) -> bool {
        let has_same_text = || {
            let text = serde_json::to_string(&chosen.source);
            text.is_ok_and(|text| text == self.text)
        };
        self.source == chosen.source || has_same_text()
    }

    fn has_other_bump(&self, chosen: &ChosenBackup) -> bool {
        chosen.bump_revision.max(0) != self.bump_revision
    }

    fn has_other_replay(&self, chosen: &ChosenBackup) -> bool {
        self.replay_revision != choice::replay_revision(chosen)
    }

    fn has_other_keys(&self, chosen: &ChosenBackup) -> bool {
        self.encryption_secret != choice::encryption_secret(chosen)
    }

    /// True if the pod that fetched the data accepted only an encrypted backup. Data from an earlier release of the
    /// operator does not record this in `origin`, so the arguments of the current pod decide.
    fn requires_encryption(&self, origin: Option<&Origin>) -> bool {
        let recorded = origin.and_then(|origin| origin.encrypted);
        recorded.unwrap_or(self.encryption_secret.is_some())
    }
}

/// The value of an argument of an init container. `prefix` is the name of the argument, including `=`.
fn argument<'a>(pod: &'a Pod, container: &str, prefix: &str) -> Option<&'a str> {
    let mut containers = pod.spec.as_ref()?.init_containers.iter().flatten();
    let arguments = containers
        .find(|one| one.name == container)?
        .args
        .as_ref()?;
    arguments.iter().find_map(|one| one.strip_prefix(prefix))
}

/// Compares the pod with the recorded backup, and writes the result to `facts`. Does nothing without a recorded
/// backup, or if the arguments of the pod are invalid.
pub(super) fn compare(restore: &EtcdRestore, pod: &Pod, facts: &mut PodFacts) {
    if let (Some(chosen), Some(arguments)) = (choice::recorded(restore), FetchArguments::of(pod)) {
        compare_arguments(chosen, &arguments, facts);
    }
}

/// Like [`compare`], with parsed arguments.
pub(crate) fn compare_arguments(
    chosen: &ChosenBackup,
    arguments: &FetchArguments<'_>,
    facts: &mut PodFacts,
) {
    facts.replays = arguments.replay_revision.is_some();
    let differs = |sha256: Option<&str>| match (sha256, &chosen.sha256) {
        (Some(sha256), Some(recorded)) => !sha256.eq_ignore_ascii_case(recorded),
        _ => false,
    };
    let fetches_other = !arguments.has_source_of(chosen)
        || differs(arguments.sha256)
        || arguments.has_other_keys(chosen)
        || arguments.has_other_bump(chosen)
        || arguments.has_other_replay(chosen);
    facts.checks_sha256 = arguments.sha256.is_some()
        && chosen.sha256.is_some()
        && !differs(arguments.sha256)
        && !arguments.has_other_keys(chosen)
        && !arguments.has_other_bump(chosen)
        && !arguments.has_other_replay(chosen);
    let Some(sha256) = facts.sha256.clone() else {
        facts.other_backup = fetches_other
            .then(|| OtherBackup::Fetches(describe(chosen, arguments, arguments.sha256, None)));
        return;
    };
    let origin = facts.origin.as_ref();
    // The report of the pod (`sha256`, `origin`) describes the data on the volume. An earlier pod with other arguments
    // may have written this data.
    let has_other_data = match (&chosen.sha256, origin) {
        // The same backup can be stored in several locations (copies), so a known SHA-256 is compared instead of the
        // location.
        (Some(_), _) => differs(Some(&sha256)),
        (None, Some(origin)) => origin.location_hash != choice::fingerprint(&chosen.source),
        (None, None) => fetches_other,
    };
    let has_other_bump = match origin {
        Some(origin) => u64::try_from(chosen.bump_revision.max(0)) != Ok(origin.bump_revision),
        None => arguments.has_other_bump(chosen),
    };
    // Two points in time can have the same base backup, so the SHA-256 of the base does not identify the point.
    let has_other_replay = match origin {
        Some(origin) => origin.replayed_revision != choice::replay_revision(chosen),
        None => arguments.has_other_replay(chosen),
    };
    // Invariant 34: an earlier pod of the seed, which did not require encryption, may have accepted an unencrypted
    // backup.
    let has_other_encryption =
        arguments.requires_encryption(origin) != choice::encryption_secret(chosen).is_some();
    let is_other = has_other_data || has_other_bump || has_other_replay || has_other_encryption;
    facts.other_backup =
        is_other.then(|| OtherBackup::Contains(describe(chosen, arguments, Some(&sha256), origin)));
}

/// Describes the data of the pod and the recorded backup in a message. The location in the report has priority over
/// the location in the arguments.
fn describe(
    chosen: &ChosenBackup,
    arguments: &FetchArguments<'_>,
    sha256: Option<&str>,
    origin: Option<&Origin>,
) -> String {
    let checksum =
        |sha256: Option<&str>| sha256.map_or_else(String::new, |it| format!(", SHA-256 {it}"));
    let raised = |by: i64| match by {
        0 => String::new(),
        by => format!(", revision raised by {by}"),
    };
    let from = match origin.map(|origin| &origin.location_hash) {
        Some(place) if *place == choice::fingerprint(&chosen.source) => chosen.location.clone(),
        Some(place) if *place != choice::fingerprint(&arguments.source) => {
            "from another location (fetched by an earlier pod of the seed)".to_owned()
        }
        _ => choice::location(&arguments.source),
    };
    let by = origin.and_then(|origin| i64::try_from(origin.bump_revision).ok());
    let replayed = |revision: Option<i64>| match revision {
        None => String::new(),
        Some(revision) => format!(", changes up to revision {revision}"),
    };
    let found_replay = match origin {
        Some(origin) => origin.replayed_revision,
        None => arguments.replay_revision,
    };
    let keys = |required: bool, secret: Option<&str>| match (required, secret) {
        (false, _) => ", not encrypted".to_owned(),
        (true, Some(secret)) => format!(", encryption keys in Secret {secret}"),
        (true, None) => ", encrypted".to_owned(),
    };
    let required = arguments.requires_encryption(origin);
    let mut found = keys(required, arguments.encryption_secret);
    let secret = choice::encryption_secret(chosen);
    let mut recorded = keys(secret.is_some(), secret);
    if found == recorded {
        found.clear();
        recorded.clear();
    }
    format!(
        "{from}{}{}{}{found} (recorded: {}{}{}{}{recorded})",
        checksum(sha256),
        raised(by.unwrap_or(arguments.bump_revision)),
        replayed(found_replay),
        chosen.location,
        checksum(chosen.sha256.as_deref()),
        raised(chosen.bump_revision),
        replayed(choice::replay_revision(chosen)),
    )
}

#[cfg(test)]
mod tests {
    use api::restore::RestoreEncryption;
    use serde_json::json;

    use super::*;

    const SHA: &str = "abcd";

    fn block(path: &str) -> StorageBlock {
        serde_json::from_value(json!({ "s3": { "path": path, "awsSecret": "aws" } })).unwrap()
    }

    /// An EtcdRestore with a recorded backup.
    fn restore(sha256: Option<&str>, bump_revision: i64) -> EtcdRestore {
        let spec = json!({ "etcdCluster": { "name": "main" }, "backup": { "name": "nightly" } });
        let mut restore = EtcdRestore::new("again", serde_json::from_value(spec).unwrap());
        let chosen = ChosenBackup {
            sha256: sha256.map(str::to_owned),
            bump_revision,
            ..choice::chosen_from(&restore, block("b/k"))
        };
        restore.status.get_or_insert_default().backup = Some(chosen);
        restore
    }

    fn pod(path: &str, more: &[&str]) -> Pod {
        let source = serde_json::to_string(&block(path)).unwrap();
        let mut arguments = vec![
            "seed".to_owned(),
            "fetch".to_owned(),
            format!("{SOURCE}{source}"),
        ];
        arguments.extend(more.iter().map(|one| (*one).to_owned()));
        serde_json::from_value(json!({ "spec": {
            "containers": [],
            "initContainers": [{ "name": "fetch", "args": arguments }],
        } }))
        .unwrap()
    }

    fn compared(restore: &EtcdRestore, pod: &Pod, reported: Option<&str>) -> PodFacts {
        let mut facts = PodFacts {
            sha256: reported.map(str::to_owned),
            restored: reported.map(|_| 100),
            ..PodFacts::default()
        };
        compare(restore, pod, &mut facts);
        facts
    }

    #[test]
    fn pod_that_fetches_other_backup_is_detected() {
        let known = restore(Some(SHA), 0);
        let fetches = |pod: &Pod| {
            let facts = compared(&known, pod, None);
            matches!(facts.other_backup, Some(OtherBackup::Fetches(_)))
        };
        assert!(!fetches(&pod("b/k", &["--sha256=ABCD"])));
        // A pod that was created before the SHA-256 was known has no `--sha256`. The location of its backup is compared
        // instead.
        assert!(!fetches(&pod("b/k", &[])));
        assert!(fetches(&pod("b/newer", &[])));
        assert!(fetches(&pod("b/k", &["--sha256=ffff"])));
        assert!(fetches(&pod("b/k", &["--bump-revision=7"])));
        // The pod must name the same Secret as the recorded backup. For example, a pod without `--encryption-secret`
        // would accept an unencrypted backup.
        let mut encrypted = known.clone();
        let backup = &mut encrypted.status.as_mut().unwrap().backup;
        let secret = "keys".to_owned();
        backup.as_mut().unwrap().encryption = Some(RestoreEncryption { secret });
        let with_keys = pod("b/k", &["--encryption-secret=keys"]);
        assert_eq!(compared(&encrypted, &with_keys, None).other_backup, None);
        assert!(fetches(&with_keys));
        for other in [pod("b/k", &[]), pod("b/k", &["--encryption-secret=other"])] {
            let Some(OtherBackup::Fetches(text)) = compared(&encrypted, &other, None).other_backup
            else {
                panic!("{other:?}")
            };
            assert!(text.contains("keys in Secret keys"), "{text}");
        }
        // If the pod has no valid arguments, or if no backup is recorded, nothing is compared.
        assert!(!fetches(&Pod::default()));
        assert!(!fetches(&pod("b/k", &["--bump-revision=x"])));
        let mut unrecorded = known.clone();
        unrecorded.status.as_mut().unwrap().backup = None;
        assert_eq!(
            compared(&unrecorded, &pod("b/newer", &[]), None).other_backup,
            None
        );
    }

    #[test]
    fn report_of_seed_pod_overrides_its_arguments() {
        let contains_other = |restore: &EtcdRestore, pod: &Pod, reported| {
            let facts = compared(restore, pod, Some(reported));
            matches!(facts.other_backup, Some(OtherBackup::Contains(_)))
        };
        let known = restore(Some(SHA), 0);
        assert!(!contains_other(&known, &pod("b/k", &[]), SHA));
        assert!(!contains_other(&known, &pod("b/copy", &[]), SHA));
        assert!(contains_other(&known, &pod("b/k", &[]), "ffff"));
        assert!(contains_other(
            &known,
            &pod("b/k", &["--bump-revision=7"]),
            SHA
        ));
        // The EtcdRestore `unknown` records no SHA-256, because its backup has no manifest. The location of the backup
        // is compared instead.
        let unknown = restore(None, 0);
        assert!(!contains_other(&unknown, &pod("b/k", &[]), "ffff"));
        assert!(contains_other(&unknown, &pod("b/newer", &[]), "ffff"));
        let text = match compared(&known, &pod("b/newer", &[]), Some("ffff")).other_backup {
            Some(OtherBackup::Contains(text)) => text,
            other => panic!("{other:?}"),
        };
        for part in ["s3://b/newer, SHA-256 ffff", "s3://b/k, SHA-256 abcd"] {
            assert!(text.contains(part), "{text}");
        }
    }

    /// The backup has no manifest, and an earlier pod has fetched the data on the volume.
    #[test]
    fn other_backup_on_volume_is_detected() {
        let (here, elsewhere) = (
            choice::fingerprint(&block("b/k")),
            choice::fingerprint(&block("b/newer")),
        );
        let other_backup = |restore: &EtcdRestore, pod: &Pod, place: &str, by: u64| {
            let mut facts = PodFacts {
                sha256: Some("ffff".into()),
                restored: Some(100),
                origin: Some(Origin {
                    location_hash: place.to_owned(),
                    bump_revision: by,
                    encrypted: Some(false),
                    replayed_revision: None,
                }),
                ..PodFacts::default()
            };
            compare(restore, pod, &mut facts);
            match facts.other_backup {
                Some(OtherBackup::Contains(text)) => Some(text),
                other => {
                    assert_eq!(other, None);
                    None
                }
            }
        };
        let (unknown, right) = (restore(None, 7), pod("b/k", &["--bump-revision=7"]));
        let other = pod("b/newer", &[]);
        for pod in [&right, &other] {
            assert_eq!(other_backup(&unknown, pod, &here, 7), None);
            assert!(other_backup(&unknown, pod, &elsewhere, 7).is_some());
            assert!(other_backup(&unknown, pod, &here, 0).is_some());
        }
        let text = other_backup(&unknown, &right, &elsewhere, 0).unwrap();
        for part in [
            "another location",
            "(recorded: s3://b/k, revision raised by 7)",
            "SHA-256 ffff",
        ] {
            assert!(text.contains(part), "{text}");
        }
        // Data from another location is accepted if it has the recorded SHA-256, but data with another `bumpRevision`
        // is not.
        let known = restore(Some("ffff"), 7);
        assert_eq!(other_backup(&known, &other, &elsewhere, 7), None);
        assert!(other_backup(&known, &right, &here, 0).is_some());
    }

    /// A suspended operator process may have created a pod without keys, which has fetched the data.
    #[test]
    fn invariant_34_data_fetched_without_required_encryption_is_detected() {
        let keys = |sha256: Option<&str>| {
            let mut restore = restore(sha256, 0);
            let backup = &mut restore.status.as_mut().unwrap().backup;
            let secret = "keys".to_owned();
            backup.as_mut().unwrap().encryption = Some(RestoreEncryption { secret });
            restore
        };
        let (with_keys, without) = (pod("b/k", &["--encryption-secret=keys"]), pod("b/k", &[]));
        let other = |restore: &EtcdRestore, pod: &Pod, encrypted: Option<bool>| {
            let mut facts = PodFacts {
                sha256: Some(SHA.into()),
                restored: Some(100),
                origin: Some(Origin {
                    location_hash: choice::fingerprint(&block("b/k")),
                    bump_revision: 0,
                    encrypted,
                    replayed_revision: None,
                }),
                ..PodFacts::default()
            };
            compare(restore, pod, &mut facts);
            facts.other_backup
        };
        for required in [keys(None), keys(Some(SHA))] {
            for pod in [&with_keys, &without] {
                let Some(OtherBackup::Contains(text)) = other(&required, pod, Some(false)) else {
                    panic!("{pod:?}")
                };
                let parts = [
                    "s3://b/k",
                    ", not encrypted (",
                    ", encryption keys in Secret keys)",
                ];
                for part in parts {
                    assert!(text.contains(part), "{text}");
                }
                assert_eq!(other(&required, pod, Some(true)), None);
            }
            // The report of a pod of an earlier release does not contain `encrypted`, so the arguments of the current
            // pod decide.
            assert_eq!(other(&required, &with_keys, None), None);
            assert!(other(&required, &without, None).is_some());
        }
        let plain = restore(Some(SHA), 0);
        assert_eq!(other(&plain, &without, Some(false)), None);
        assert!(other(&plain, &without, Some(true)).is_some());
        // `checks_sha256` is false if the recorded backup is encrypted, but the arguments of the pod do not require
        // encryption.
        let known = keys(Some(SHA));
        let checks_sha256 = |more: &[&str]| compared(&known, &pod("b/k", more), None).checks_sha256;
        assert!(checks_sha256(&[
            "--sha256=ABCD",
            "--encryption-secret=keys"
        ]));
        assert!(!checks_sha256(&["--sha256=ABCD"]));
    }

    #[test]
    fn pod_that_requires_recorded_sha256_is_recognized() {
        let known = restore(Some(SHA), 0);
        assert!(compared(&known, &pod("b/k", &["--sha256=ABCD"]), None).checks_sha256);
        assert!(!compared(&known, &pod("b/k", &["--sha256=ffff"]), None).checks_sha256);
        assert!(!compared(&known, &pod("b/k", &[]), None).checks_sha256);
        let unknown = restore(None, 0);
        assert!(!compared(&unknown, &pod("b/k", &["--sha256=abcd"]), None).checks_sha256);
        // The pod has the recorded SHA-256, but another `bumpRevision`.
        let raised = pod("b/k", &["--sha256=ABCD", "--bump-revision=7"]);
        assert!(!compared(&known, &raised, None).checks_sha256);
    }

    /// Two points can have the same base, and then the same SHA-256.
    #[test]
    fn invariant_38_data_of_other_point_is_detected() {
        let point = json!({
            "revision": 17, "time": "2026-11-28T01:02:03.000004Z", "base": "10-ab", "baseRevision": 10,
            "baseTime": "2026-11-28T00:00:00.000000Z", "clusterID": "ab", "segments": 2, "segmentBytes": 300,
            "prefix": "uid/",
        });
        let mut wanted = restore(Some(SHA), 0);
        let chosen = &mut wanted.status.as_mut().unwrap().backup;
        chosen.as_mut().unwrap().continuous = serde_json::from_value(point).unwrap();
        let (right, other) = (
            pod("b/k", &["--replay-revision=17"]),
            pod("b/k", &["--replay-revision=18"]),
        );
        let without = pod("b/k", &[]);
        let facts = compared(&wanted, &right, None);
        assert_eq!((facts.other_backup, facts.replays), (None, true));
        for pod in [&other, &without] {
            let facts = compared(&wanted, pod, None);
            let Some(OtherBackup::Fetches(text)) = facts.other_backup else {
                panic!("{pod:?}")
            };
            assert!(
                text.contains("recorded: s3://b/k, SHA-256 abcd, changes up to revision 17"),
                "{text}"
            );
        }
        let contains = |restore: &EtcdRestore, replayed_revision: Option<i64>| {
            let mut facts = PodFacts {
                sha256: Some(SHA.into()),
                restored: Some(17),
                origin: Some(Origin {
                    location_hash: choice::fingerprint(&block("b/k")),
                    bump_revision: 0,
                    encrypted: Some(false),
                    replayed_revision,
                }),
                ..PodFacts::default()
            };
            compare(restore, &right, &mut facts);
            facts.other_backup.is_some()
        };
        assert!(!contains(&wanted, Some(17)));
        assert!(contains(&wanted, Some(18)));
        assert!(contains(&wanted, None));
        assert!(contains(&restore(Some(SHA), 0), Some(17)));
    }
}
