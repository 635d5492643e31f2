//! Reads EtcdClusters, and connects to their members. All EtcdRoles and EtcdUsers of an EtcdCluster share an
//! observation for three seconds, so that many objects cause few requests.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use api::EtcdCluster;
use api::cluster::TlsPolicy;
use api::names::ANNOTATION_RESTORE;
use api::problem::Chain;
use api::version::EtcdVersion;
use etcd::{Deadlines, Etcd, EtcdClient, Login};
use futures::FutureExt;
use kube::{Api, Client, ResourceExt};
use runtime::clients::Clients;
use runtime::members::{MemberPods, address_forms, pods_of};
use runtime::reach::of_cluster;

use crate::reason::{Reason, Trouble};
use crate::snapshot::{Cluster, ClusterFacts, EtcdFacts};

/// Deadlines of calls to members. `call` leaves time for etcd's slow hash of a password.
const DEADLINES: Deadlines = Deadlines {
    connect: Duration::from_secs(1),
    status: Duration::from_secs(1),
    call: Duration::from_secs(5),
    hedge: Duration::from_secs(1),
    defragment: Duration::from_mins(10),
    progress: Duration::from_secs(30),
    idle: Duration::from_mins(2),
};

/// Time for which objects share an observation. It is shorter than ten seconds, the maximum age of an observation
/// (invariant 11).
const SHARED: Duration = Duration::from_secs(3);
/// Time after which an unused observation is dropped. Each object of an existing EtcdCluster requests the observation
/// at least once a minute.
const FORGOTTEN: Duration = Duration::from_mins(10);

/// The members of an EtcdCluster, and the client with the credentials of the operators.
pub(crate) struct Members {
    pub(crate) client: Arc<EtcdClient>,
    pub(crate) urls: Vec<String>,
}

/// An observation of an EtcdCluster.
pub(crate) struct ObservedCluster {
    /// The start of the observation.
    pub(crate) at: Instant,
    pub(crate) cluster: Cluster,
    members: Option<Members>,
}

impl ObservedCluster {
    /// The members of the EtcdCluster.
    ///
    /// # Errors Fails if the operator cannot call them. The error does not name the cause: the plan finds the cause in
    /// `cluster`.
    pub(crate) fn members(&self) -> Result<&Members, Trouble> {
        self.members.as_ref().ok_or_else(|| {
            let text = "the members of the EtcdCluster cannot be called";
            Trouble::new(Reason::ClusterNotReady, text)
        })
    }
}

type Slot = Arc<tokio::sync::Mutex<Option<Arc<ObservedCluster>>>>;

struct Shared {
    slot: Slot,
    asked: Instant,
}

/// The observations of all EtcdClusters.
pub(crate) struct Clusters {
    client: Client,
    etcd: Clients<EtcdClient>,
    shared: Mutex<HashMap<(String, String), Shared>>,
}

impl Clusters {
    pub(crate) fn new(client: Client) -> Self {
        Self {
            client,
            etcd: Clients::with_users(DEADLINES),
            shared: Mutex::default(),
        }
    }

    fn shared(&self) -> MutexGuard<'_, HashMap<(String, String), Shared>> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Observes an EtcdCluster, or returns an observation that is less than three seconds old.
    pub(crate) async fn of(&self, namespace: &str, name: &str) -> Arc<ObservedCluster> {
        let slot = {
            let mut shared = self.shared();
            let key = (namespace.to_owned(), name.to_owned());
            let one = shared.entry(key).or_insert_with(|| Shared {
                slot: Slot::default(),
                asked: Instant::now(),
            });
            one.asked = Instant::now();
            Arc::clone(&one.slot)
        };
        let mut last = slot.lock().await;
        if let Some(observed) = last.as_ref()
            && observed.at.elapsed() < SHARED
        {
            return Arc::clone(observed);
        }
        let observed = Arc::new(self.read(namespace, name).boxed().await);
        *last = Some(Arc::clone(&observed));
        observed
    }

    /// Drops the observation of an EtcdCluster that has changed.
    pub(crate) fn invalidate(&self, namespace: &str, name: &str) {
        let key = (namespace.to_owned(), name.to_owned());
        self.shared().remove(&key);
    }

    /// Drops the observations and the clients that were not used for a long time, because their EtcdCluster is probably
    /// deleted.
    pub(crate) fn forget(&self, now: Instant) {
        self.shared()
            .retain(|_, one| now.duration_since(one.asked) < FORGOTTEN);
        self.etcd.forget(now);
    }

    async fn read(&self, namespace: &str, name: &str) -> ObservedCluster {
        let at = Instant::now();
        let clusters = Api::<EtcdCluster>::namespaced(self.client.clone(), namespace);
        let cluster = match clusters.get_opt(name).await {
            Ok(Some(cluster)) => cluster,
            Ok(None) => return without_members(at, Cluster::Missing),
            Err(error) => {
                let why = Chain(&error).to_string();
                return without_members(at, Cluster::Unknown(why));
            }
        };
        let (etcd, members) = match self.connect(&cluster).boxed().await {
            Ok((facts, members)) => (Ok(facts), Some(members)),
            Err(trouble) => (Err(trouble), None),
        };
        ObservedCluster {
            at,
            cluster: Cluster::Present(facts(&cluster, etcd)),
            members,
        }
    }

    /// Connects to the members, and checks that they belong to the etcd cluster in the status of the EtcdCluster.
    async fn connect(&self, cluster: &EtcdCluster) -> Result<(EtcdFacts, Members), Trouble> {
        let name = cluster.name_any();
        let not_ready = |text: String| Trouble::new(Reason::ClusterNotReady, text);
        let forms = address_forms(&self.client, cluster).await;
        let pods = pods_of(&self.client, cluster, &forms).await;
        let MemberPods { urls, cluster_id } = pods.map_err(|error| not_ready(error.to_string()))?;
        let access = of_cluster(&self.client, cluster).await;
        let access = access.map_err(|why| {
            let text = format!("EtcdCluster {name}: {why}");
            Trouble::new(Reason::AuthSecret, text)
        })?;
        let uid = cluster.uid().unwrap_or_default();
        let operator_user = access.credentials.as_ref().map(|one| one.user.clone());
        let id = cluster_id.to_string();
        let client = self.etcd.of((uid.as_str(), Some(id.as_str())), &access);
        let failed = |error: etcd::Error| etcd_trouble(&name, &error);
        let members = client.members(&urls).await.map_err(failed)?;
        if members.cluster_id != cluster_id {
            return Err(not_ready(format!(
                "the members of EtcdCluster {name} belong to another etcd cluster than its status"
            )));
        }
        let is_auth_enabled = match client.login(&urls).await.map_err(failed)? {
            Some(Login::Refused(text)) => {
                return Err(etcd_trouble(&name, &etcd::Error::AccessDenied(text)));
            }
            Some(Login::Accepted | Login::Former) => true,
            Some(Login::Off) | None => false,
        };
        let facts = EtcdFacts {
            is_auth_enabled,
            operator_user,
        };
        Ok((facts, Members { client, urls }))
    }
}

fn without_members(at: Instant, cluster: Cluster) -> ObservedCluster {
    ObservedCluster {
        at,
        cluster,
        members: None,
    }
}

fn facts(cluster: &EtcdCluster, etcd: Result<EtcdFacts, Trouble>) -> ClusterFacts {
    let spec = &cluster.spec;
    let status = cluster.status.as_ref();
    let version = status.and_then(|status| status.current_version.as_deref());
    ClusterFacts {
        uid: cluster.uid().unwrap_or_default(),
        cluster_id: status.and_then(|status| status.cluster_id.clone()),
        is_deleting: cluster.metadata.deletion_timestamp.is_some(),
        is_paused: spec.paused,
        is_hibernated: spec.hibernate,
        is_restoring: cluster.annotations().contains_key(ANNOTATION_RESTORE),
        has_auth: spec.auth.is_some(),
        has_client_tls: spec.tls.as_ref().is_some_and(TlsPolicy::insists_on_tls),
        version: version.and_then(|version| EtcdVersion::parse(version).ok()),
        etcd,
    }
}

/// The problem if etcd does not answer a call, or rejects it.
pub(super) fn etcd_trouble(cluster: &str, error: &etcd::Error) -> Trouble {
    match error {
        etcd::Error::AccessDenied(why) => Trouble::new(
            Reason::EtcdAccessDenied,
            format!(
                "etcd denies the operator access to EtcdCluster {cluster} ({why}): set spec.auth.secret of the \
                 EtcdCluster to a Secret with username and password of a user with the role root"
            ),
        ),
        error => Trouble::new(
            Reason::EtcdUnreachable,
            format!("etcd of EtcdCluster {cluster} does not answer: {error}"),
        ),
    }
}
