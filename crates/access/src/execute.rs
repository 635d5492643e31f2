//! Sends the changes of a plan in their order. Decides nothing.
//!
//! Each change is sent at most once, and only within ten seconds of the observation (invariant 11). If the answer to a
//! call is lost, the next reconcile observes etcd and plans again. A repeated call does no harm, because every call is
//! idempotent.

use std::time::Instant;

use api::names::{FINALIZER_ACCESS, MANAGER_CLUSTER};
use futures::FutureExt;
use kube::{Api, Client, ResourceExt};
use runtime::apply;

use crate::object::AccessObject;
use crate::observe::Members;
use crate::outcome::Error;
use crate::plan::{Call, Step};

/// The results of the changes.
#[derive(Default)]
pub(crate) struct Executed {
    /// The calls that etcd has acknowledged.
    pub(crate) calls: Vec<Call>,
    /// True if etcd has created the role or the user.
    pub(crate) has_created: bool,
    /// True if a change of the object itself was sent, so that its resourceVersion may no longer be current.
    pub(crate) has_changed_object: bool,
    /// Why a change failed. The changes after the failed change were not sent.
    pub(crate) error: Option<Error>,
}

impl Executed {
    /// The results if an error prevents all changes.
    pub(crate) fn failed(error: Error) -> Self {
        Self {
            error: Some(error),
            ..Self::default()
        }
    }
}

/// The servers to which the changes are sent, and the password of the user.
pub(crate) struct Servers<'a> {
    /// The Kubernetes client, which does not retry requests.
    pub(crate) client: &'a Client,
    pub(crate) members: Option<&'a Members>,
    pub(crate) password: Option<&'a str>,
}

/// Sends the changes. `since` is the start of the observation.
pub(crate) async fn execute<K: AccessObject>(
    servers: &Servers<'_>,
    object: &K,
    steps: &[Step],
    since: Instant,
) -> Executed {
    let mut executed = Executed::default();
    for step in steps {
        if !apply::is_fresh(since) {
            executed.error = Some(Error::TooOld);
            break;
        }
        let done = match step {
            Step::SetFinalizer(set) => {
                executed.has_changed_object = true;
                set_finalizer(servers.client, object, *set).await
            }
            Step::Call(call) => {
                let called = send(servers, object, call).boxed().await;
                if called.is_ok() {
                    executed.calls.push(call.clone());
                    executed.has_created |= call.creates();
                }
                called
            }
        };
        if let Err(error) = done {
            executed.error = Some(error);
            break;
        }
    }
    executed
}

async fn set_finalizer<K: AccessObject>(
    client: &Client,
    object: &K,
    set: bool,
) -> Result<(), Error> {
    let namespace = object.namespace().unwrap_or_default();
    let api = Api::<K>::namespaced(client.clone(), &namespace);
    let names = [FINALIZER_ACCESS];
    let changed = apply::set_finalizers(&api, MANAGER_CLUSTER, object, &names, set).await;
    changed.map_err(Error::Finalizer)
}

async fn send<K: AccessObject>(
    servers: &Servers<'_>,
    object: &K,
    call: &Call,
) -> Result<(), Error> {
    let failed = |source: etcd::Error| Error::Etcd {
        change: call.to_string(),
        source,
    };
    let missing = |what: &str| failed(etcd::Error::Other(format!("the operator has no {what}")));
    let Members { client, urls } = servers.members.ok_or_else(|| missing("members"))?;
    let password = servers.password.ok_or_else(|| missing("password"));
    let name = object.entry();
    let sent = match call {
        Call::CreateRole => {
            let created = client.create_role(urls, name).await.map_err(failed)?;
            return created.then_some(()).ok_or(Error::Exists(K::WORD));
        }
        Call::CreateUser { with_password } => {
            let password = with_password.then_some(password).transpose()?;
            let created = client.create_user(urls, name, password).await;
            let created = created.map_err(failed)?;
            return created.then_some(()).ok_or(Error::Exists(K::WORD));
        }
        Call::DeleteRole => client.delete_role(urls, name).await,
        Call::GrantPermission(one) => client.grant_permission(urls, name, one).await,
        Call::RevokePermission(range) => client.revoke_permission(urls, name, range).await,
        Call::DeleteUser => client.delete_user(urls, name).await,
        Call::SetPassword => client.set_user_password(urls, name, password?).await,
        Call::GrantRole(role) => client.grant_role(urls, name, role).await,
        Call::RevokeRole(role) => client.revoke_role(urls, name, role).await,
    };
    sent.map_err(failed)
}
