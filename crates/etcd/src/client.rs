//! The real client, based on `etcd-client`. It keeps one connection for each member, until the connection fails or is
//! idle.
//!
//! The client makes no decisions about membership. It connects, sends a call within a deadline, and converts the
//! response.

mod append;
mod auth;
mod calls;
mod convert;
mod deadlines;
mod pulse;
mod snapshot;

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use async_trait::async_trait;
use etcd_client::{
    AlarmAction, AlarmOptions, AlarmType, Certificate, Client, CompactionOptions, ConnectOptions,
    DowngradeOptions, GetOptions, Identity, MemberAddOptions, TlsOptions,
};
use tokio::time::Instant;

use convert::{alarms_from, members_from, status_from};
pub use deadlines::Deadlines;

use crate::access::{Access, split};
use crate::answer::{ALREADY_VOTER, COMPACTED, classify, of_read};
use crate::limits::MAX_SNAPSHOT;
use crate::login::Session;
use crate::port::{
    Added, Alarm, AlarmKind, Error, Etcd, KeyHash, Login, MemberId, Members, Pulse, Snapshot,
    Status,
};

struct Connection {
    client: Client,
    answered: Instant,
}

/// The client through which the operators call etcd.
pub struct EtcdClient {
    access: Access,
    deadlines: Deadlines,
    max_snapshot: u64,
    connections: Mutex<HashMap<String, Connection>>,
    session: Session,
}

impl EtcdClient {
    /// Creates a client for one cluster, or for several clusters with the same access.
    pub fn new(access: Access) -> Self {
        Self::with_deadlines(access, Deadlines::default())
    }

    /// Like [`EtcdClient::new`], but with these deadlines.
    pub fn with_deadlines(access: Access, deadlines: Deadlines) -> Self {
        Self {
            session: Session::new(access.credentials.clone(), has_certificate(&access)),
            access,
            deadlines,
            max_snapshot: MAX_SNAPSHOT,
            connections: Mutex::new(HashMap::new()),
        }
    }

    /// Sets the maximum size of a snapshot in bytes.
    #[must_use]
    pub fn with_max_snapshot(mut self, bytes: u64) -> Self {
        self.max_snapshot = bytes;
        self
    }

    fn connections(&self) -> std::sync::MutexGuard<'_, HashMap<String, Connection>> {
        // No operation under the lock can leave the map inconsistent, so a poisoned lock is safe to use.
        self.connections
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    async fn connect(&self, endpoint: &str) -> Result<Client, Error> {
        let mut options = ConnectOptions::new().with_connect_timeout(self.deadlines.connect);
        let (url, name) = split(endpoint);
        if url.starts_with("https://") {
            let Some(tls) = &self.access.tls else {
                return Err(Error::Tls(format!(
                    "{endpoint}: an https URL requires the cluster's CA certificate"
                )));
            };
            let mut config = TlsOptions::new().ca_certificate(Certificate::from_pem(&tls.ca));
            if let Some((certificate, key)) = &tls.identity {
                config = config.identity(Identity::from_pem(certificate, key));
            }
            if let Some(name) = name {
                config = config.domain_name(name);
            }
            options = options.with_tls(config);
        } else if !url.starts_with("http://") {
            return Err(Error::Other(format!(
                "{endpoint}: a client URL must start with http:// or https://"
            )));
        }
        self.session
            .connect(url, options)
            .await
            // No request was sent yet.
            .map_err(|error| of_read(classify(endpoint, &error)))
    }

    async fn connection(&self, endpoint: &str) -> Result<Client, Error> {
        self.close_idle();
        let client = self
            .connections()
            .get(endpoint)
            .map(|found| found.client.clone());
        match client {
            Some(client) => Ok(client),
            None => self.connect(endpoint).await,
        }
    }

    /// Closes connections that were not used for [`Deadlines::idle`], because their members may no longer exist.
    pub fn close_idle(&self) {
        let idle = self.deadlines.idle;
        self.connections()
            .retain(|_, connection| connection.answered.elapsed() < idle);
    }
}

/// Whether the client has a certificate. If etcd has a user with the common name of the certificate, the certificate
/// authenticates the client as this user (`AuthInfoFromTLS` in etcd's `server/auth/store.go`).
fn has_certificate(access: &Access) -> bool {
    let tls = access.tls.as_ref();
    tls.is_some_and(|tls| tls.identity.is_some())
}

#[async_trait]
impl Etcd for EtcdClient {
    async fn members(&self, via: &[String]) -> Result<Members, Error> {
        self.read(via, |mut client| async move {
            // etcd before 3.5 always returns the local list of the member, and the library never requests a
            // linearizable list. A linearizable read of an empty range on the same member therefore comes first. When
            // it returns, the member has applied all entries that were committed before.
            let barrier = client
                .get(
                    [0_u8],
                    Some(GetOptions::new().with_count_only().with_range([0_u8, 0_u8])),
                )
                .await?;
            let list = client.member_list().await?;
            let asked = barrier.header().map(etcd_client::ResponseHeader::member_id);
            let answered = list.header().map(etcd_client::ResponseHeader::member_id);
            if asked != answered {
                return Err(etcd_client::Error::EndpointError(
                    "the connection switched to another member between two calls".to_owned(),
                ));
            }
            members_from(list.header(), list.members())
        })
        .await
    }

    async fn status(&self, member: &str) -> Result<Status, Error> {
        self.ask(member, self.deadlines.status, |mut client| async move {
            let status = client.status().await?;
            Ok(status_from(&status))
        })
        .await
    }

    async fn pulse(&self, health: &str) -> Result<Pulse, Error> {
        pulse::ask(health, self.deadlines.status).await
    }

    async fn local_members(&self, member: &str) -> Result<Members, Error> {
        // This read must not be linearizable, because the caller needs the member's local list.
        self.ask(member, self.deadlines.status, |mut client| async move {
            let list = client.member_list().await?;
            members_from(list.header(), list.members())
        })
        .await
    }

    async fn alarms(&self, via: &[String]) -> Result<Vec<Alarm>, Error> {
        self.read(via, |mut client| async move {
            let answer = client
                .alarm(AlarmAction::Get, AlarmType::None, None)
                .await?;
            Ok(alarms_from(answer.alarms()))
        })
        .await
    }

    async fn disarm(&self, via: &[String], alarm: Alarm) -> Result<(), Error> {
        self.change(via, |mut client| async move {
            let kind = match alarm.kind {
                AlarmKind::NoSpace => AlarmType::Nospace,
                AlarmKind::Corrupt => AlarmType::Corrupt,
            };
            let mut member = AlarmOptions::new();
            member.with_member(alarm.member.0);
            let answer = client.alarm(AlarmAction::Deactivate, kind, Some(member));
            answer.await.map(|_| ())
        })
        .await
    }

    async fn append_entries(&self, member: &str, until: u64) -> Result<(), Error> {
        append::append_entries(self, member, until).await
    }

    async fn compact(&self, via: &[String], revision: i64) -> Result<(), Error> {
        self.change(via, |mut client| async move {
            let options = CompactionOptions::new().with_physical();
            match client.compact(revision, Some(options)).await {
                Err(etcd_client::Error::GRpcStatus(status))
                    if status.message().ends_with(COMPACTED) =>
                {
                    Ok(())
                }
                answer => answer.map(|_| ()),
            }
        })
        .await
    }

    async fn defragment(&self, member: &str) -> Result<(), Error> {
        let deadline = self.deadlines.defragment;
        self.send(member, deadline, |mut client| async move {
            client.defragment().await.map(|_| ())
        })
        .await
    }

    async fn add_member(
        &self,
        via: &[String],
        peer_urls: &[String],
        learner: bool,
    ) -> Result<Added, Error> {
        self.change(via, |mut client| {
            let urls = peer_urls.to_vec();
            async move {
                let mut options = MemberAddOptions::new();
                if learner {
                    options = options.with_is_learner();
                }
                let answer = client.member_add(urls, Some(options)).await?;
                let Some(member) = answer.member() else {
                    return Err(etcd_client::Error::Internal(
                        "the response to MemberAdd contains no member".to_owned(),
                    ));
                };
                Ok(Added {
                    id: MemberId(member.id()),
                    members: members_from(answer.header(), answer.member_list())?,
                })
            }
        })
        .await
    }

    async fn update_member(
        &self,
        via: &[String],
        id: MemberId,
        peer_urls: &[String],
    ) -> Result<(), Error> {
        self.change(via, |mut client| {
            let urls = peer_urls.to_vec();
            async move { client.member_update(id.0, urls).await.map(|_| ()) }
        })
        .await
    }

    async fn promote_member(&self, via: &[String], id: MemberId) -> Result<(), Error> {
        self.change(via, |mut client| async move {
            match client.member_promote(id.0).await {
                // The member is already a voter, because an earlier promotion succeeded and its response was lost.
                Err(etcd_client::Error::GRpcStatus(status))
                    if status.message() == ALREADY_VOTER =>
                {
                    Ok(())
                }
                answer => answer.map(|_| ()),
            }
        })
        .await
    }

    async fn remove_member(&self, via: &[String], id: MemberId) -> Result<(), Error> {
        self.change(via, |mut client| async move {
            client.member_remove(id.0).await.map(|_| ())
        })
        .await
    }

    async fn move_leader(&self, leader: &str, to: MemberId) -> Result<(), Error> {
        self.send(leader, self.deadlines.call, |mut client| async move {
            client.move_leader(to.0).await.map(|_| ())
        })
        .await
    }

    async fn downgrade(&self, via: &[String], to: Option<&str>) -> Result<(), Error> {
        let end = Instant::now() + self.deadlines.call;
        let send = |options: DowngradeOptions| {
            self.change_before(end, via, move |client| {
                let options = options.clone();
                async move {
                    let mut client = client.maintenance_client();
                    client.downgrade(options).await.map(|_| ())
                }
            })
        };
        let Some(version) = to else {
            return send(DowngradeOptions::Cancel).await;
        };
        send(DowngradeOptions::Validate(version.to_owned())).await?;
        send(DowngradeOptions::Enable(version.to_owned())).await
    }

    async fn login(&self, via: &[String]) -> Result<Option<Login>, Error> {
        self.login_state(via).await
    }

    async fn enable_auth(&self, via: &[String]) -> Result<(), Error> {
        self.enable_authentication(via).await
    }

    async fn disable_auth(&self, via: &[String]) -> Result<(), Error> {
        self.disable_authentication(via).await
    }

    async fn change_password(&self, via: &[String]) -> Result<(), Error> {
        self.set_password(via).await
    }

    async fn snapshot(&self, member: &str) -> Result<Snapshot, Error> {
        self.stream(member).await
    }

    async fn hash(&self, member: &str, revision: i64) -> Result<Option<KeyHash>, Error> {
        let answer = self
            .ask(member, self.deadlines.progress, |mut client| async move {
                match client.hash_kv(revision).await {
                    Err(etcd_client::Error::GRpcStatus(status))
                        if status.message().ends_with(COMPACTED) =>
                    {
                        Ok(None)
                    }
                    answer => answer.map(Some),
                }
            })
            .await?;
        Ok(answer.map(|answer| KeyHash {
            hash: answer.hash(),
            // etcd reports -1 if the store was never compacted.
            compacted: answer.compact_version().max(0),
        }))
    }
}
