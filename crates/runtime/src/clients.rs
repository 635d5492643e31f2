//! The etcd clients of the clusters. All clusters without TLS and authentication share one client. Private keys are
//! kept in memory only.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use etcd::{Access, Deadlines, Etcd, EtcdClient};

/// The operator drops a client that was unused for this long. The clients of existing clusters are used more often.
const FORGOTTEN: Duration = Duration::from_mins(10);

/// The etcd clients: one for each EtcdCluster and cluster token, and one for all clusters without TLS and
/// authentication.
pub struct Clients<C: ?Sized = dyn Etcd> {
    plain: Arc<C>,
    create: fn(EtcdClient) -> Arc<C>,
    deadlines: Deadlines,
    kept: Mutex<HashMap<Key, Kept<C>>>,
}

/// The UID of the EtcdCluster, and its cluster token.
type Key = (String, Option<String>);

struct Kept<C: ?Sized> {
    access: Access,
    client: Arc<C>,
    asked: Instant,
}

impl Clients {
    /// `plain` is the client for clusters without TLS and authentication. The clients of clusters with TLS or
    /// authentication get `deadlines`.
    pub fn new(plain: Arc<dyn Etcd>, deadlines: Deadlines) -> Self {
        Self {
            plain,
            create: |client| Arc::new(client),
            deadlines,
            kept: Mutex::default(),
        }
    }
}

impl Clients<EtcdClient> {
    /// Like [`Clients::new`], for callers that also change users and roles.
    pub fn with_users(deadlines: Deadlines) -> Self {
        let plain = EtcdClient::with_deadlines(Access::default(), deadlines);
        Self {
            plain: Arc::new(plain),
            create: Arc::new,
            deadlines,
            kept: Mutex::default(),
        }
    }
}

impl<C: ?Sized> Clients<C> {
    /// The client for the cluster with this UID, token and access.
    ///
    /// Each cluster token has its own client and login, because a restore in place or a recovery creates an etcd
    /// cluster with a new Raft log. For a call with a login token of the old cluster, the new cluster would wait until
    /// its log is as long as the old log (`isValidSimpleToken` in etcd's `server/auth/simple_token.go`).
    pub fn of(&self, (uid, token): (&str, Option<&str>), access: &Access) -> Arc<C> {
        if *access == Access::default() {
            return Arc::clone(&self.plain);
        }
        let now = Instant::now();
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (uid.to_owned(), token.map(str::to_owned));
        if let Some(one) = kept.get_mut(&key)
            && one.access == *access
        {
            one.asked = now;
            return Arc::clone(&one.client);
        }
        let client = EtcdClient::with_deadlines(access.clone(), self.deadlines);
        let client = (self.create)(client);
        let one = Kept {
            access: access.clone(),
            client: Arc::clone(&client),
            asked: now,
        };
        kept.insert(key, one);
        client
    }

    /// Drops the etcd clients that were not used for ten minutes, and closes their connections.
    pub fn forget(&self, now: Instant) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.retain(|_, one| now.duration_since(one.asked) < FORGOTTEN);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use etcd::TlsAccess;

    fn access(ca: &str) -> Access {
        Access {
            tls: Some(TlsAccess {
                ca: ca.as_bytes().to_vec(),
                identity: None,
                user: None,
            }),
            credentials: None,
        }
    }

    #[test]
    fn etcd_client_is_reused_until_access_changes() {
        let plain: Arc<dyn Etcd> = Arc::new(EtcdClient::new(Access::default()));
        let clients = Clients::new(Arc::clone(&plain), Deadlines::default());
        assert!(Arc::ptr_eq(
            &clients.of(("1", Some("t")), &Access::default()),
            &plain
        ));
        let first = clients.of(("1", Some("t")), &access("a"));
        assert!(!Arc::ptr_eq(&first, &plain));
        assert!(Arc::ptr_eq(
            &first,
            &clients.of(("1", Some("t")), &access("a"))
        ));
        assert!(!Arc::ptr_eq(
            &first,
            &clients.of(("2", Some("t")), &access("a"))
        ));
        assert!(!Arc::ptr_eq(
            &first,
            &clients.of(("1", Some("t")), &access("b"))
        ));
    }

    #[test]
    fn unused_etcd_client_is_dropped() {
        let plain: Arc<dyn Etcd> = Arc::new(EtcdClient::new(Access::default()));
        let clients = Clients::new(plain, Deadlines::default());
        let (first, now) = (clients.of(("1", Some("t")), &access("a")), Instant::now());
        let gone = Arc::downgrade(&first);
        drop(first);
        clients.forget(now);
        assert!(
            gone.upgrade().is_some(),
            "a recently used etcd client must be kept"
        );
        clients.forget(now + FORGOTTEN);
        assert!(gone.upgrade().is_none());
    }

    /// Without a new client, the new cluster would delay every call with a login token of the previous cluster.
    #[test]
    fn restored_or_recovered_cluster_gets_new_etcd_client() {
        let plain: Arc<dyn Etcd> = Arc::new(EtcdClient::new(Access::default()));
        let clients = Clients::new(plain, Deadlines::default());
        let first = clients.of(("1", Some("t")), &access("a"));
        let second = clients.of(("1", Some("restore-t")), &access("a"));
        assert!(!Arc::ptr_eq(&first, &second));
        assert!(Arc::ptr_eq(
            &second,
            &clients.of(("1", Some("restore-t")), &access("a"))
        ));
        assert!(
            Arc::ptr_eq(&first, &clients.of(("1", Some("t")), &access("a"))),
            "the client for the previous cluster token must be kept, because a recovery calls the old and the new cluster"
        );
    }
}
