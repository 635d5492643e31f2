//! The calls of etcd's API. Each call is sent as a read or as a change, to one member or to several members.

use async_trait::async_trait;
use etcd_client::{
    AlarmAction, AlarmOptions, AlarmType, CompactionOptions, DowngradeOptions, GetOptions,
    MemberAddOptions,
};
use tokio::time::Instant;

use super::append::append_entries;
use super::convert::{alarms_from, members_from, status_from};
use super::{EtcdClient, pulse};
use crate::answer::{ALREADY_VOTER, COMPACTED};
use crate::port::{
    Added, Alarm, AlarmKind, Error, Etcd, KeyHash, Login, MemberId, Members, Pulse, Snapshot,
    Status,
};

#[async_trait]
impl Etcd for EtcdClient {
    async fn members(&self, via: &[String]) -> Result<Members, Error> {
        self.read(via, |mut client| async move {
            // `member_list` returns the member's local list, which may be stale. The client therefore first sends a
            // linearizable read of an empty range to the same member. After this read, the member has applied all
            // entries that were committed before the read.
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
        // No linearizable read precedes this request, because the caller needs the local list of this member.
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
        append_entries(self, member, until).await
    }

    async fn compact(&self, via: &[String], revision: i64) -> Result<(), Error> {
        self.change(via, |mut client| async move {
            let options = CompactionOptions::new().with_physical();
            unless_compacted(client.compact(revision, Some(options)).await).map(drop)
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
                // This error counts as success, because the member is a voter. For example, the response to an earlier
                // promotion was lost.
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
                unless_compacted(client.hash_kv(revision).await)
            })
            .await?;
        Ok(answer.map(|answer| KeyHash {
            hash: answer.hash(),
            // etcd reports the revision -1 if it was never compacted.
            compacted: answer.compact_version().max(0),
        }))
    }

    async fn key_count(&self, member: &str, revision: i64) -> Result<Option<i64>, Error> {
        let answer = self
            .ask(member, self.deadlines.progress, |mut client| async move {
                let options = GetOptions::new().with_all_keys().with_count_only();
                // A serializable read needs no quorum.
                let options = options.with_serializable().with_revision(revision);
                unless_compacted(client.get([0_u8], Some(options)).await)
            })
            .await?;
        Ok(answer.map(|answer| answer.count()))
    }
}

/// The answer of etcd; `None` if etcd has compacted the requested revision.
fn unless_compacted<T>(
    answer: Result<T, etcd_client::Error>,
) -> Result<Option<T>, etcd_client::Error> {
    match answer {
        Err(etcd_client::Error::GRpcStatus(status)) if status.message().ends_with(COMPACTED) => {
            Ok(None)
        }
        answer => answer.map(Some),
    }
}
