//! The program of the container `verify`: waits until etcd serves the restored data, and compares the data with the
//! manifest of the backup. Connects only to localhost.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use etcd::served;
use member::Contents;
use member::verification::{METRICS, PEER};

use super::pod_state::{Proof, Report};

/// Delay between two requests to etcd. The first requests may fail, because etcd is starting.
const POLL: Duration = Duration::from_millis(500);

/// Time limit of one request. It is long, because etcd reads its whole database to compute the hash of the keys.
const REQUEST: Duration = Duration::from_mins(10);

/// Arguments of the command `verify`, which runs in the pod of a verification.
#[derive(Args, Clone, Debug)]
pub struct Verify {
    /// Directory where the volume with the restored data is mounted
    #[arg(long, default_value = api::names::DATA_MOUNT)]
    volume: PathBuf,
    /// Address of etcd's peer listener
    #[arg(long, default_value = PEER)]
    peer: String,
    /// Address of etcd's listener for health and metrics
    #[arg(long, default_value = METRICS)]
    metrics: String,
    /// File for the report
    #[arg(long, default_value = "/dev/termination-log")]
    report: PathBuf,
}

/// Compares the restored data with the manifest, and writes the report. Returns true if the data matches. This function
/// has no time limit, because the pod has a deadline.
pub async fn run(arguments: &Verify) -> bool {
    let report = compare(arguments).await;
    let text = serde_json::to_string(&report).unwrap_or_default();
    if let Err(error) = fs::write(&arguments.report, &text) {
        tracing::warn!(%error, "cannot write the report for the kubelet");
    }
    tracing::info!(report = text, "verification ended");
    matches!(report, Report::Verified(_))
}

async fn compare(arguments: &Verify) -> Report {
    let expected = loop {
        match expected(&arguments.volume.join("restored.json")) {
            Some(expected) => break expected,
            None => tokio::time::sleep(POLL).await,
        }
    };
    loop {
        let (peer, metrics) = (&arguments.peer, &arguments.metrics);
        match served(peer, metrics, expected.revision, REQUEST).await {
            Ok(found) => return judge(&expected, &found),
            Err(error) => tracing::debug!(%error, "etcd does not serve the restored data yet"),
        }
        tokio::time::sleep(POLL).await;
    }
}

/// Reads the file that the container `etcd` writes after it has restored the data. `None` if the file does not exist
/// yet.
fn expected(path: &Path) -> Option<Contents> {
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}

/// Compares the data that etcd serves with the manifest. A higher revision is allowed, because an expired lease deletes
/// keys and raises the revision. With a higher revision, the number of keys is not compared. The hash in the manifest
/// covers only the revisions of the backup, so a higher revision does not prevent its comparison.
fn judge(expected: &Contents, found: &etcd::Served) -> Report {
    if found.revision < expected.revision {
        return Report::Failed {
            message: format!(
                "the restored etcd serves revision {} instead of {}",
                found.revision, expected.revision
            ),
        };
    }
    let counts = expected.keys.zip(found.keys);
    let counts = counts.filter(|_| found.revision == expected.revision);
    if let Some((expected, found)) = counts.filter(|(expected, found)| !is_equal(*expected, *found))
    {
        return Report::Failed {
            message: format!(
                "the restored etcd serves {found} keys, but the manifest records {expected} keys"
            ),
        };
    }
    let hashes = expected.hash.zip(found.hash);
    if let Some((expected, found)) = hashes.filter(|(expected, found)| expected != found) {
        return Report::Failed {
            message: format!(
                "etcd's hash of the restored data is {:08x} (compacted at revision {}), but the manifest records the \
                 hash {:08x} (compacted at revision {})",
                found.hash, found.compacted, expected.hash, expected.compacted
            ),
        };
    }
    Report::Verified(Proof {
        revision: expected.revision,
        keys: counts.map(|(expected, _)| expected).or(found.keys),
        keys_compared: counts.is_some(),
        hash_compared: hashes.is_some(),
    })
}

/// Compares the number of keys in the manifest with a metric of the restored etcd. If a restore has raised the
/// revision of the cluster (`unsafeBumpBucketsRevision` in etcdutl), the data contains an empty key. The metric counts
/// this key, but the manifest does not.
fn is_equal(expected: i64, found: i64) -> bool {
    found == expected || found == expected.saturating_add(1)
}

#[cfg(test)]
mod tests {
    use etcd::{KeyHash, Served};

    use super::*;

    fn contents(keys: Option<i64>, hash: Option<u32>) -> Contents {
        Contents {
            revision: 7,
            size: 100,
            sha256: String::new(),
            hash: hash.map(|hash| KeyHash { hash, compacted: 3 }),
            keys,
            origin: None,
        }
    }

    fn found(revision: i64, keys: i64, hash: u32) -> Served {
        Served {
            revision,
            hash: Some(KeyHash { hash, compacted: 3 }),
            keys: Some(keys),
        }
    }

    fn proof(keys: i64, keys_compared: bool, hash_compared: bool) -> Report {
        Report::Verified(Proof {
            revision: 7,
            keys: Some(keys),
            keys_compared,
            hash_compared,
        })
    }

    #[test]
    fn different_hash_or_lower_revision_fails_verification() {
        let verified = |hash| proof(2, false, hash);
        assert_eq!(
            judge(&contents(None, Some(9)), &found(7, 2, 9)),
            verified(true)
        );
        // The expiry of a lease in the restored etcd has raised the revision from 7 to 8.
        assert_eq!(
            judge(&contents(None, Some(9)), &found(8, 2, 9)),
            verified(true)
        );
        assert_eq!(
            judge(&contents(None, None), &found(7, 2, 9)),
            verified(false)
        );
        for (expected, found) in [
            (contents(None, Some(9)), found(7, 2, 8)),
            (contents(None, Some(9)), found(6, 2, 9)),
            (contents(None, None), found(6, 2, 9)),
        ] {
            let report = judge(&expected, &found);
            assert!(matches!(report, Report::Failed { .. }), "{report:?}");
        }
    }

    #[test]
    fn different_number_of_keys_fails_verification() {
        let recorded = contents(Some(2), Some(9));
        assert_eq!(judge(&recorded, &found(7, 2, 9)), proof(2, true, true));
        // The manifest of a large database contains no hash, so only the number of keys is compared.
        let large = contents(Some(2), None);
        assert_eq!(judge(&large, &found(7, 2, 9)), proof(2, true, false));
        // If an earlier restore has raised the revision of the cluster, the data contains an empty key (see
        // `is_equal`). One key more than in the manifest is therefore accepted.
        assert_eq!(judge(&recorded, &found(7, 3, 9)), proof(2, true, true));
        for keys in [1, 4] {
            for recorded in [&recorded, &large] {
                let Report::Failed { message } = judge(recorded, &found(7, keys, 9)) else {
                    panic!("{keys} keys were accepted");
                };
                for part in [format!("serves {keys} keys"), "records 2 keys".to_owned()] {
                    assert!(message.contains(&part), "{message}");
                }
            }
        }
        // The expiry of a lease in the restored etcd has deleted a key and raised the revision.
        assert_eq!(judge(&recorded, &found(8, 1, 9)), proof(1, false, true));
    }
}
