//! A backup in an object store or on a PersistentVolumeClaim as the source of a seed. Performs no I/O.

use api::storage::{StorageBlock, StorageSource};
use api::version::EtcdVersion;
use k8s_openapi::api::core::v1::{
    PersistentVolumeClaimVolumeSource, SecretVolumeSource, Volume, VolumeMount,
};

use super::{Replay, Source};

/// The argument of `seed fetch` with the storage block of the backup.
pub const SOURCE: &str = "--source=";
/// The argument of `seed fetch` with the SHA-256 that the snapshot must have.
pub const SHA256: &str = "--sha256=";
/// The argument of `seed fetch` with the name of the Secret that contains the keys of an encrypted backup.
pub const ENCRYPTION: &str = "--encryption-secret=";

/// The argument of `seed fetch` with the revision at which the replay of recorded changes ends.
pub const REPLAY_REVISION: &str = "--replay-revision=";

const SECRET: &str = "/run/restore/secret";
const CA: &str = "/run/restore/ca";
const KEYS: &str = "/run/restore/encryption";
const CLAIM: &str = "/run/restore/claim";
const CLAIM_VOLUME: &str = "restore-claim";
/// File mode of mounted Secrets. The user and the group of the pod can read the files.
const SECRET_MODE: i32 = 0o440;

impl Source {
    /// Fetches the backup in a storage block. Only the container `fetch` mounts the Secrets (invariant 14). Rejects a
    /// backup from a newer minor release than `version`, and a snapshot with another SHA-256 than `sha256`.
    pub fn store(block: &StorageBlock, version: &EtcdVersion, sha256: Option<&str>) -> Self {
        let mut source = Self {
            // The arguments contain names of Secrets, but not their content (invariant 14).
            arguments: vec![
                format!(
                    "{SOURCE}{}",
                    serde_json::to_string(block).unwrap_or_default()
                ),
                format!("--etcd-version={version}"),
            ],
            ..Self::default()
        };
        source
            .arguments
            .extend(sha256.map(|sha256| format!("{SHA256}{sha256}")));
        if let StorageSource::Pvc(pvc) = block.source() {
            source.arguments.push(format!("--claim={CLAIM}"));
            source.mount(
                CLAIM,
                Volume {
                    name: CLAIM_VOLUME.to_owned(),
                    persistent_volume_claim: Some(PersistentVolumeClaimVolumeSource {
                        claim_name: pvc.claim_name.clone(),
                        ..PersistentVolumeClaimVolumeSource::default()
                    }),
                    ..Volume::default()
                },
            );
        }
        let secrets = block.source().secrets();
        let mounted = [
            ("restore-secret", "secret", SECRET, secrets.credentials),
            ("restore-ca", "ca", CA, secrets.ca),
        ];
        for (volume, argument, path, secret) in mounted {
            let Some(secret) = secret else { continue };
            source.arguments.push(format!("--{argument}={path}"));
            source.mount_secret(path, volume, secret.name);
        }
        source
    }

    /// Decrypts the backup with a key in this Secret, and rejects a backup that is not encrypted. Only the container
    /// `fetch` mounts the Secret (invariant 14).
    #[must_use]
    pub fn encrypted(mut self, secret: &str) -> Self {
        self.arguments.push(format!("{ENCRYPTION}{secret}"));
        self.arguments.push(format!("--encryption-keys={KEYS}"));
        self.mount_secret(KEYS, "restore-encryption", secret);
        self
    }

    /// Adds the recorded changes with this prefix in the store, which are replayed before etcd serves. The fetched
    /// snapshot must be the base of these changes.
    #[must_use]
    pub fn replaying(mut self, prefix: &str, replay: Replay) -> Self {
        self.arguments.extend([
            format!("--replay-prefix={prefix}"),
            format!("--replay-base={}", replay.base),
            format!("{REPLAY_REVISION}{}", replay.revision),
        ]);
        self.replay = Some(replay);
        self
    }

    fn mount_secret(&mut self, path: &str, volume: &str, secret: &str) {
        self.mount(
            path,
            Volume {
                name: volume.to_owned(),
                secret: Some(SecretVolumeSource {
                    secret_name: Some(secret.to_owned()),
                    default_mode: Some(SECRET_MODE),
                    // The Secret is optional, so that a pod that is created again can start after the Secret was
                    // deleted.
                    optional: Some(true),
                    ..SecretVolumeSource::default()
                }),
                ..Volume::default()
            },
        );
    }

    fn mount(&mut self, path: &str, volume: Volume) {
        self.mounts.push(VolumeMount {
            name: volume.name.clone(),
            mount_path: path.to_owned(),
            read_only: Some(true),
            ..VolumeMount::default()
        });
        self.volumes.push(volume);
    }
}
