//! Reads the inputs of the plan for the copies: opens the stores with their Secrets, and reads the data that the
//! retention rules need. Sends no request to a store.

use api::EtcdBackup;
use api::backup::BackupCopy;
use api::storage::StorageSource;
use jiff::Timestamp;
use kube::ResourceExt;
use store::Target;
use tokio::time::timeout;

use super::{ObserveContext, READ_TIMEOUT, clock, others, site};
use crate::plan::copies::{CopyNeed, copy_rules, need};
use crate::reason::{Reason, Trouble};
use crate::snapshot::{CopyInputs, CopyRetention};

/// The open stores of one copy.
pub(crate) struct CopyStores {
    /// The store of the backups to copy; `None` for a removal of copies.
    pub(crate) from: Option<Target>,
    /// The store of the copy.
    pub(crate) to: Target,
}

/// Completes `states`, the states of the workers, with the data that the plan needs. `states` has one item for each
/// entry of `spec.copyTo`.
pub(crate) async fn inputs(
    context: &ObserveContext,
    backup: &EtcdBackup,
    states: Vec<CopyInputs>,
    now: Timestamp,
) -> (Vec<CopyInputs>, Vec<Option<CopyStores>>) {
    let mut all = Vec::new();
    let mut stores = Vec::new();
    let copies = backup.spec.copy_to.iter().zip(states);
    for (index, (copy, state)) in copies.enumerate() {
        let need = need(backup, copy, &state, now);
        if need == CopyNeed::Nothing {
            all.push(state);
            stores.push(None);
            continue;
        }
        let opened = Box::pin(open(context, backup, (index, copy), need));
        let opened = timeout(READ_TIMEOUT, opened).await.unwrap_or_else(|_| {
            let message = format!("no answer from the API server within {READ_TIMEOUT:?}");
            Err(Trouble::new(Reason::StepFailed, message))
        });
        let has_rules = need == CopyNeed::Copy && copy_rules(backup, copy).is_some();
        let retention = if has_rules && opened.is_ok() {
            let retention = timeout(READ_TIMEOUT, Box::pin(retention(context, backup, copy)));
            let late = || Trouble::new(Reason::StepFailed, "no answer from the API server");
            Some(retention.await.unwrap_or_else(|_| Err(late())))
        } else {
            None
        };
        all.push(CopyInputs {
            opened: Some(opened.as_ref().map(|_| ()).map_err(Clone::clone)),
            retention,
            ..state
        });
        stores.push(opened.ok());
    }
    (all, stores)
}

/// Opens the stores of a copy, with the same checks of grants and Secrets as for the store of `spec.storageType`.
async fn open(
    context: &ObserveContext,
    backup: &EtcdBackup,
    (index, copy): (usize, &BackupCopy),
    need: CopyNeed,
) -> Result<CopyStores, Trouble> {
    let source = source_of(copy)?;
    let to = site::open(context, backup, &source).await;
    let to = to.map_err(|trouble| in_copy(index, &source, &trouble))?;
    let from = if need == CopyNeed::Copy {
        let first = site::source_of(backup)?;
        Some(site::open(context, backup, &first).await?)
    } else {
        None
    };
    let namespace = backup.namespace().unwrap_or_default();
    let limited = |target: Target| Target {
        store: context.reads.limit(&namespace, target.store),
        key: target.key,
    };
    Ok(CopyStores {
        from: from.map(limited),
        to: limited(to),
    })
}

fn source_of(copy: &BackupCopy) -> Result<StorageSource<'_>, Trouble> {
    copy.blocks()
        .select(&copy.storage_type, "spec.copyTo", "storageType")
        .map_err(|problem| Trouble::new(Reason::InvalidSpec, problem.to_string()))
}

/// Replaces the storage field in a message with the field of the copy, for example `spec.s3` with `spec.copyTo[0].s3`.
fn in_copy(index: usize, source: &StorageSource<'_>, trouble: &Trouble) -> Trouble {
    let block = source.block();
    let field = format!("spec.copyTo[{index}].{block}");
    let message = trouble.message.replace(&format!("spec.{block}"), &field);
    Trouble::new(trouble.reason, message)
}

/// The data that the retention rules of the copy need.
async fn retention(
    context: &ObserveContext,
    backup: &EtcdBackup,
    copy: &BackupCopy,
) -> Result<CopyRetention, Trouble> {
    let others = others(&context.objects, backup, &source_of(copy)?)?;
    Ok(CopyRetention {
        others,
        clock_difference: clock::difference(&context.client).await?,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn message_about_copy_contains_field_of_copy() {
        let copy =
            json!({ "name": "second", "storageType": "S3", "s3": { "path": "bucket/etcd" } });
        let copy: BackupCopy = serde_json::from_value(copy).unwrap();
        let source = source_of(&copy).unwrap();
        let message = "spec.s3.awsSecret: there is no Secret aws in this namespace";
        let trouble = in_copy(1, &source, &Trouble::new(Reason::SecretMissing, message));
        assert_eq!(
            trouble.message,
            "spec.copyTo[1].s3.awsSecret: there is no Secret aws in this namespace"
        );
        assert_eq!(trouble.reason, Reason::SecretMissing);
    }
}
