//! Opens buckets, and reads the Secrets of an EtcdRestore or an EtcdBackup.

use api::storage::{SecretName, StorageBlock};
use k8s_openapi::api::core::v1::Secret;

use super::{ObserveContext, read};
use crate::reason::{Reason, Trouble};
use crate::source::{self, OpenedSource, SecretData};

/// Opens a bucket with the Secrets that its block names, if the namespace may access it.
pub(super) async fn open(
    context: &ObserveContext<'_>,
    namespace: &str,
    block: &StorageBlock,
) -> Result<OpenedSource, Trouble> {
    let source = block.source();
    let ambient = store::ambient(&source).is_some();
    let allowed = context.grants.check(namespace, &source, ambient);
    allowed.map_err(|why| Trouble::new(Reason::AccessDenied, why))?;
    let named = source.secrets();
    let credentials = secret(context, namespace, named.credentials).await?;
    let ca = secret(context, namespace, named.ca).await?;
    source::open(block, credentials.as_ref(), ca.as_ref(), None).await
}

/// Reads a Secret. `None` if no Secret is named.
pub(super) async fn secret(
    context: &ObserveContext<'_>,
    namespace: &str,
    named: Option<SecretName<'_>>,
) -> Result<Option<SecretData>, Trouble> {
    let Some(SecretName { field, name }) = named else {
        return Ok(None);
    };
    let secret = read::<Secret>(context.client, namespace, name)
        .await
        .map_err(|why| Trouble::new(Reason::StepFailed, format!("{field}: {why}")))?;
    let missing = || {
        let message = format!(
            "{field}: there is no Secret {name} in {namespace}: create it, or correct the name"
        );
        Trouble::new(Reason::SecretMissing, message)
    };
    let data = secret.ok_or_else(missing)?.data.unwrap_or_default();
    Ok(Some(
        data.into_iter()
            .map(|(key, value)| (key, value.0))
            .collect(),
    ))
}
