//! Encryption of stored backups.

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::problem::Problem;
use crate::schema::object_name;

/// Encryption of stored backups. The operator encrypts a backup with the user's key before it writes the backup to the
/// store.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Encryption {
    /// Name of the Secret with the keys. Each entry of the Secret is one key: 32 random bytes, encoded in base64.
    #[schemars(schema_with = "object_name")]
    pub secret: String,
    /// Name of the entry with the key for new backups. Required if the Secret has more than one entry.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    #[x_kube(validation = (
        "self.matches('^[-._a-zA-Z0-9]+$')",
        "encryption.key must be the name of an entry of the Secret: use letters, digits, dots, dashes and underscores"
    ))]
    pub key: Option<String>,
}

/// The key that encrypts a backup.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct EncryptionKey {
    /// Name of the entry in the Secret when the backup was made.
    pub name: String,
    /// ID of the key, in hexadecimal. A restore searches the Secret for the key with this ID.
    pub id: String,
}

impl Encryption {
    /// The problems of the field. `prefix` is its path in the object.
    pub(crate) fn problems(&self, prefix: &str) -> Vec<Problem> {
        let mut problems = Vec::new();
        if self.secret.is_empty() {
            problems.push(Problem::new(
                format!("{prefix}.secret"),
                "is empty",
                "name the Secret with the keys",
            ));
        }
        let is_entry = |name: &str| {
            let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
            !name.is_empty() && name.bytes().all(allowed)
        };
        if let Some(key) = self.key.as_deref().filter(|key| !is_entry(key)) {
            problems.push(Problem::new(
                format!("{prefix}.key"),
                format!("is {key:?}, which is not the name of an entry of a Secret"),
                "use letters, digits, dots, dashes and underscores",
            ));
        }
        problems
    }
}
