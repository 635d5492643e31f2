//! The reconciles of one EtcdRole and of one EtcdUser: observe, plan, execute, status.

use std::sync::Arc;
use std::time::{Duration, Instant};

use api::names::MANAGER_CLUSTER;
use api::{EtcdRole, EtcdUser};
use futures::FutureExt;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::{Api, ResourceExt};
use runtime::logs::in_stage;
use runtime::{Done, Reconcile, apply};

use crate::execute::{Executed, Servers, execute};
use crate::object::AccessObject;
use crate::observe::{ObserveContext, ObservedCluster, ObservedUser};
use crate::outcome::{Error, Failed};
use crate::plan::{Plan, Record, plan_role, plan_user};
use crate::reason::Reason;
use crate::status;

/// Delay after a conflict, and between the steps of a creation.
const NEXT_STEP: Duration = Duration::from_millis(200);

/// Reconciles EtcdRoles.
pub(crate) struct RoleReconciler(pub(crate) Arc<ObserveContext>);

/// Reconciles EtcdUsers.
pub(crate) struct UserReconciler(pub(crate) Arc<ObserveContext>);

impl Reconcile for RoleReconciler {
    type Object = EtcdRole;
    type Error = Failed;

    async fn reconcile(&self, object: Arc<EtcdRole>) -> Result<Done, Failed> {
        let since = Instant::now();
        let Some(role) = live(&self.0, &*object).await? else {
            return Ok(Done::default());
        };
        let (cluster, snapshot) = in_stage("observe", self.0.role(&role).boxed()).await;
        let plan = plan_role(&role, &snapshot);
        let attempt = Attempt {
            context: &self.0,
            object: &role,
            cluster: &cluster,
            password: None,
            since,
            now: now(),
        };
        attempt.finish(&plan).boxed().await
    }
}

impl Reconcile for UserReconciler {
    type Object = EtcdUser;
    type Error = Failed;

    async fn reconcile(&self, object: Arc<EtcdUser>) -> Result<Done, Failed> {
        let since = Instant::now();
        let Some(user) = live(&self.0, &*object).await? else {
            return Ok(Done::default());
        };
        let mut observed = in_stage("observe", self.0.user(&user).boxed()).await;
        let now = now();
        let mut plan = plan_user(&user, &observed.snapshot, now);
        let mut failed = None;
        if plan.asks {
            let check = in_stage("observe", observed.check_password(&user).boxed()).await;
            failed = check.err().map(Error::Password);
            if failed.is_none() {
                plan = plan_user(&user, &observed.snapshot, now);
            }
        }
        let ObservedUser {
            cluster, password, ..
        } = observed;
        let attempt = Attempt {
            context: &self.0,
            object: &user,
            cluster: &cluster,
            password: password.as_ref().map(|found| found.password.as_str()),
            since,
            now,
        };
        match failed {
            Some(error) => attempt.report(&plan, Executed::failed(error)).boxed().await,
            None => attempt.finish(&plan).boxed().await,
        }
    }
}

/// Reads the object again, because the status of the cached object may lack the ownership that the last reconcile has
/// recorded. `None` if the object was deleted.
async fn live<K: AccessObject>(context: &ObserveContext, object: &K) -> Result<Option<K>, Error> {
    let namespace = object.namespace().unwrap_or_default();
    let api = Api::<K>::namespaced(context.client.clone(), &namespace);
    api.get_opt(&object.name_any()).await.map_err(Error::Read)
}

/// The part of a reconcile after the plan: execution and status.
struct Attempt<'a, K> {
    context: &'a ObserveContext,
    object: &'a K,
    cluster: &'a ObservedCluster,
    password: Option<&'a str>,
    /// The start of the reconcile.
    since: Instant,
    now: Timestamp,
}

impl<K: AccessObject> Attempt<'_, K> {
    async fn finish(&self, plan: &Plan) -> Result<Done, Failed> {
        let servers = Servers {
            client: &self.context.client,
            members: self.cluster.members().ok(),
            password: self.password,
        };
        // Several reconciles share one observation of the EtcdCluster, so `cluster.at` may be earlier than the start of
        // this reconcile.
        let since = self.since.min(self.cluster.at);
        let executed = execute(&servers, self.object, &plan.steps, since).boxed();
        let executed = in_stage("execute", executed).await;
        self.report(plan, executed).await
    }

    /// Writes the status, unless this reconcile has changed the object itself. In this case, the next reconcile writes
    /// the status.
    async fn report(&self, plan: &Plan, executed: Executed) -> Result<Done, Failed> {
        let changes = status::changes(self.object, &executed);
        let error = if executed.has_changed_object {
            executed.error
        } else {
            let written = self.write_status(plan, &executed).await;
            executed.error.or(written.err())
        };
        match error {
            Some(error) if !error.is_outdated() => Err(Failed { error, changes }),
            None if !executed.has_changed_object => Ok(Done {
                requeue: Some(requeue(plan)),
                notices: changes.into_iter().chain(status::waiting(plan)).collect(),
            }),
            _ => Ok(Done {
                requeue: Some(NEXT_STEP),
                notices: changes,
            }),
        }
    }

    async fn write_status(&self, plan: &Plan, executed: &Executed) -> Result<(), Error> {
        let desired = status::compute(self.object, plan, executed, &Time(self.now));
        let namespace = self.object.namespace().unwrap_or_default();
        let api = Api::<K>::namespaced(self.context.client.clone(), &namespace);
        let current = self.object.status();
        let written =
            apply::status_if_unchanged(&api, MANAGER_CLUSTER, self.object, current, &desired);
        let written = in_stage("status", written.boxed()).await;
        written.map(drop).map_err(Error::Status)
    }
}

/// The time until the next reconcile. After the status has recorded the ownership, the next step follows at once.
fn requeue(plan: &Plan) -> Duration {
    let is_in_progress = plan.state.reason == Reason::InProgress;
    if is_in_progress && matches!(plan.record, Record::Owned(_)) {
        NEXT_STEP
    } else {
        plan.requeue()
    }
}

/// The current time in whole seconds, as Kubernetes stores it.
fn now() -> Timestamp {
    Timestamp::from_second(Timestamp::now().as_second()).unwrap_or_default()
}
