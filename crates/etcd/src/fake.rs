//! An etcd cluster in memory, for the tests of the operators. It follows etcd's membership rules, and tests can make
//! calls fail.
//!
//! The rules are those of `mayAddMember`, `mayRemoveMember` and `mayPromoteMember` of etcd's server. Unlike etcd, the
//! fake regards a member as connected as soon as it is up.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::{self, StreamExt};

use crate::port::{
    Added, Alarm, ClusterId, Error, Etcd, KeyHash, Login, Member, MemberId, Members, Pulse,
    Snapshot, Status,
};

/// One member of a [`FakeEtcd`].
#[derive(Clone, Debug)]
pub struct FakeMember {
    /// The member's entry in the member list.
    pub member: Member,
    /// Whether the member runs and is connected.
    pub up: bool,
    /// Whether the learner's log is close enough to the leader's log for a promotion.
    pub caught_up: bool,
    /// The version that `status` reports.
    pub version: String,
    /// The revision that `status` reports.
    pub revision: i64,
    /// The size of the database in bytes that `status` reports.
    pub db_size: i64,
    /// Number of free bytes in the database, which a defragmentation releases.
    pub free: i64,
}

/// The state of a [`FakeEtcd`]. Tests read and change it.
#[derive(Clone, Debug)]
pub struct FakeState {
    /// The ID that all members of the fake report.
    pub cluster_id: ClusterId,
    /// The members, in order of their addition.
    pub members: Vec<FakeMember>,
    /// The leader. If the leader is down, the first voter that is up becomes the leader.
    pub leader: Option<MemberId>,
    /// etcd's `--max-learners`.
    pub max_learners: usize,
    /// The target version of an enabled downgrade.
    pub downgrade: Option<String>,
    /// The alarms that etcd has raised and not disarmed.
    pub alarms: Vec<Alarm>,
    /// The compaction revision.
    pub compacted: i64,
    /// The chunks of a snapshot, including the SHA-256.
    pub snapshot: Vec<Bytes>,
    /// The hash that every member reports for its keys.
    pub hash: Option<KeyHash>,
    /// The number of keys that every member reports.
    pub keys: Option<i64>,
    /// The result of a login. `None` if the client has no credentials.
    pub login: Option<Login>,
    /// The health data of each health listener. The key is the address with the port.
    pub pulses: BTreeMap<String, Pulse>,
    /// The duration of a `status` call.
    pub slow: Duration,
    /// The results of the next calls, in order: `Some` makes a call fail, and `None` lets it succeed.
    pub script: VecDeque<Option<Error>>,
    next_id: u64,
}

/// An etcd cluster in memory.
#[derive(Debug)]
pub struct FakeEtcd {
    state: Mutex<FakeState>,
}

impl FakeEtcd {
    /// Creates a cluster of running voters with these names. `client_url` returns the client URL for a member's name.
    pub fn formed(cluster_id: u64, names: &[&str], client_url: impl Fn(&str) -> String) -> Self {
        let members: Vec<FakeMember> = (1..)
            .zip(names)
            .map(|(id, name)| FakeMember {
                member: Member {
                    id: MemberId(id),
                    name: (*name).to_owned(),
                    peer_urls: vec![client_url(name).replace("2379", "2380")],
                    client_urls: vec![client_url(name)],
                    is_learner: false,
                },
                up: true,
                caught_up: true,
                version: "3.6.16".to_owned(),
                revision: 1,
                db_size: 20_480,
                free: 0,
            })
            .collect();
        Self {
            state: Mutex::new(FakeState {
                cluster_id: ClusterId(cluster_id),
                leader: members.first().map(|first| first.member.id),
                next_id: members.len() as u64 + 1,
                members,
                max_learners: 1,
                alarms: Vec::new(),
                downgrade: None,
                compacted: 0,
                snapshot: Vec::new(),
                hash: None,
                keys: None,
                login: None,
                pulses: BTreeMap::new(),
                slow: Duration::ZERO,
                script: VecDeque::new(),
            }),
        }
    }

    /// Lets a test read or change the state of the fake.
    pub fn with<T>(&self, change: impl FnOnce(&mut FakeState) -> T) -> T {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let answer = change(&mut state);
        state.elect();
        answer
    }

    /// Starts the member `id`, which a test has added before. Sets its name and its client URL.
    pub fn start(&self, id: MemberId, name: &str, client_url: &str) {
        self.with(|state| {
            if let Some(member) = state.find(id) {
                name.clone_into(&mut member.member.name);
                member.member.client_urls = vec![client_url.to_owned()];
                member.up = true;
            }
        });
    }

    fn ask<T>(
        &self,
        via: &[String],
        quorum: bool,
        answer: impl FnOnce(&mut FakeState) -> Result<T, Error>,
    ) -> Result<T, Error> {
        self.with(|state| {
            if let Some(Some(error)) = state.script.pop_front() {
                return Err(error);
            }
            let reached = state.members.iter().any(|member| {
                member.up
                    && member
                        .member
                        .client_urls
                        .iter()
                        .any(|url| via.contains(url))
            });
            if !reached {
                return Err(Error::Unreachable(via.join("; ")));
            }
            if quorum && !state.has_quorum() {
                return Err(Error::Timeout(via.join("; ")));
            }
            answer(state)
        })
    }
}

impl FakeState {
    fn voters(&self) -> impl Iterator<Item = &FakeMember> {
        self.members
            .iter()
            .filter(|member| !member.member.is_learner)
    }

    fn up(&self) -> usize {
        self.voters().filter(|member| member.up).count()
    }

    fn has_quorum(&self) -> bool {
        self.up() > self.voters().count() / 2
    }

    fn elect(&mut self) {
        let leader = self.has_quorum().then(|| {
            self.voters()
                .find(|member| member.up && Some(member.member.id) == self.leader)
                .or_else(|| self.voters().find(|member| member.up))
                .map(|member| member.member.id)
        });
        self.leader = leader.flatten();
    }

    fn find(&mut self, id: MemberId) -> Option<&mut FakeMember> {
        self.members
            .iter_mut()
            .find(|member| member.member.id == id)
    }

    fn list(&self) -> Members {
        let mut members: Vec<Member> = self
            .members
            .iter()
            .map(|member| member.member.clone())
            .collect();
        members.sort_by_key(|member| member.id);
        Members {
            cluster_id: self.cluster_id,
            members,
        }
    }

    fn may_add(&self, learner: bool) -> Result<(), Error> {
        let voters = self.voters().count();
        let started = self
            .voters()
            .filter(|member| !member.member.name.is_empty())
            .count();
        // As in etcd, the quorum includes the new voter, which has not started yet.
        let quorum = usize::midpoint(voters, 1) + 1;
        if !learner && voters > 1 && started < quorum {
            return Err(Error::Unavailable(
                "re-configuration failed due to not enough started members".to_owned(),
            ));
        }
        if voters > 1 && self.up() < quorum {
            return Err(Error::Unavailable("unhealthy cluster".to_owned()));
        }
        let learners = self.members.len() - voters;
        if learner && learners >= self.max_learners {
            return Err(Error::Unavailable(
                "too many learner members in cluster".to_owned(),
            ));
        }
        Ok(())
    }

    fn may_remove(&self, id: MemberId) -> Result<(), Error> {
        let Some(member) = self.members.iter().find(|member| member.member.id == id) else {
            return Err(Error::MemberNotFound);
        };
        if member.member.is_learner || !member.up {
            return Ok(());
        }
        let left = self.voters().count() - 1;
        if left > 0 && self.up() - 1 < 1 + left / 2 {
            return Err(Error::Unavailable("unhealthy cluster".to_owned()));
        }
        Ok(())
    }
}

#[async_trait]
impl Etcd for FakeEtcd {
    async fn members(&self, via: &[String]) -> Result<Members, Error> {
        self.ask(via, true, |state| Ok(state.list()))
    }

    async fn status(&self, member: &str) -> Result<Status, Error> {
        let slow = self.with(|state| state.slow);
        if !slow.is_zero() {
            tokio::time::sleep(slow).await;
        }
        let via = [member.to_owned()];
        self.ask(&via, false, |state| {
            let found = state
                .members
                .iter()
                .find(|found| found.member.client_urls.contains(&via[0]))
                .ok_or_else(|| Error::Unreachable(member.to_owned()))?;
            let index = u64::try_from(found.revision).unwrap_or_default() + 10;
            Ok(Status {
                cluster_id: state.cluster_id,
                member_id: found.member.id,
                version: found.version.clone(),
                leader: state.leader,
                is_learner: found.member.is_learner,
                revision: found.revision,
                raft_term: 2,
                raft_index: index,
                raft_applied_index: index,
                db_size: found.db_size,
                db_size_in_use: found.db_size - found.free,
                errors: state
                    .alarms
                    .iter()
                    .map(|alarm| format!("{alarm:?}"))
                    .collect(),
                storage_version: None,
                downgrade: state.downgrade.clone(),
            })
        })
    }

    async fn pulse(&self, health: &str) -> Result<Pulse, Error> {
        let pulse = self.with(|state| state.pulses.get(health).cloned());
        pulse.ok_or_else(|| Error::Unreachable(health.to_owned()))
    }

    async fn local_members(&self, member: &str) -> Result<Members, Error> {
        self.ask(&[member.to_owned()], false, |state| Ok(state.list()))
    }

    async fn alarms(&self, via: &[String]) -> Result<Vec<Alarm>, Error> {
        self.ask(via, true, |state| Ok(state.alarms.clone()))
    }

    async fn disarm(&self, via: &[String], alarm: Alarm) -> Result<(), Error> {
        self.ask(via, true, |state| {
            state.alarms.retain(|raised| *raised != alarm);
            Ok(())
        })
    }

    async fn compact(&self, via: &[String], revision: i64) -> Result<(), Error> {
        self.ask(via, true, |state| {
            state.compacted = state.compacted.max(revision);
            Ok(())
        })
    }

    async fn append_entries(&self, member: &str, _until: u64) -> Result<(), Error> {
        self.ask(&[member.to_owned()], true, |_| Ok(()))
    }

    async fn defragment(&self, member: &str) -> Result<(), Error> {
        let via = [member.to_owned()];
        self.ask(&via, false, |state| {
            let reached = |found: &&mut FakeMember| found.member.client_urls.contains(&via[0]);
            if let Some(found) = state.members.iter_mut().find(reached) {
                found.db_size -= std::mem::take(&mut found.free);
            }
            Ok(())
        })
    }

    async fn add_member(
        &self,
        via: &[String],
        peer_urls: &[String],
        learner: bool,
    ) -> Result<Added, Error> {
        self.ask(via, true, |state| {
            let taken = state.members.iter().any(|member| {
                member
                    .member
                    .peer_urls
                    .iter()
                    .any(|url| peer_urls.contains(url))
            });
            if taken {
                return Err(Error::PeerUrlExists);
            }
            state.may_add(learner)?;
            let id = MemberId(state.next_id);
            state.next_id += 1;
            state.members.push(FakeMember {
                member: Member {
                    id,
                    name: String::new(),
                    peer_urls: peer_urls.to_vec(),
                    client_urls: Vec::new(),
                    is_learner: learner,
                },
                up: false,
                caught_up: false,
                version: "3.6.16".to_owned(),
                revision: 1,
                db_size: 20_480,
                free: 0,
            });
            Ok(Added {
                id,
                members: state.list(),
            })
        })
    }

    async fn update_member(
        &self,
        via: &[String],
        id: MemberId,
        peer_urls: &[String],
    ) -> Result<(), Error> {
        self.ask(via, true, |state| {
            let others = state.members.iter().filter(|other| other.member.id != id);
            let mut taken = others.flat_map(|other| &other.member.peer_urls);
            if taken.any(|url| peer_urls.contains(url)) {
                return Err(Error::PeerUrlExists);
            }
            let member = state.find(id).ok_or(Error::MemberNotFound)?;
            member.member.peer_urls = peer_urls.to_vec();
            Ok(())
        })
    }

    async fn promote_member(&self, via: &[String], id: MemberId) -> Result<(), Error> {
        self.ask(via, true, |state| {
            let member = state.find(id).ok_or(Error::MemberNotFound)?;
            if member.member.is_learner && !(member.up && member.caught_up) {
                return Err(Error::Unavailable(
                    "can only promote a learner member which is in sync with leader".to_owned(),
                ));
            }
            member.member.is_learner = false;
            Ok(())
        })
    }

    async fn remove_member(&self, via: &[String], id: MemberId) -> Result<(), Error> {
        self.ask(via, true, |state| {
            state.may_remove(id)?;
            state.members.retain(|member| member.member.id != id);
            Ok(())
        })
    }

    async fn move_leader(&self, leader: &str, to: MemberId) -> Result<(), Error> {
        let via = [leader.to_owned()];
        self.ask(&via, true, |state| {
            let leads = state.members.iter().any(|member| {
                Some(member.member.id) == state.leader
                    && member.member.client_urls.contains(&via[0])
            });
            if !leads {
                return Err(Error::Unavailable("not leader".to_owned()));
            }
            if !state.voters().any(|member| member.member.id == to) {
                return Err(Error::Unavailable("bad leader transferee".to_owned()));
            }
            state.leader = Some(to);
            Ok(())
        })
    }

    async fn downgrade(&self, via: &[String], to: Option<&str>) -> Result<(), Error> {
        self.ask(via, true, |state| {
            state.downgrade = to.map(str::to_owned);
            Ok(())
        })
    }

    async fn login(&self, via: &[String]) -> Result<Option<Login>, Error> {
        self.ask(via, true, |state| Ok(state.login.clone()))
    }

    async fn enable_auth(&self, via: &[String]) -> Result<(), Error> {
        self.ask(via, true, |state| {
            state.login = Some(Login::Accepted);
            Ok(())
        })
    }

    async fn disable_auth(&self, via: &[String]) -> Result<(), Error> {
        self.ask(via, true, |state| {
            state.login = Some(Login::Off);
            Ok(())
        })
    }

    async fn change_password(&self, via: &[String]) -> Result<(), Error> {
        self.ask(via, true, |state| {
            state.login = Some(Login::Accepted);
            Ok(())
        })
    }

    async fn snapshot(&self, member: &str) -> Result<Snapshot, Error> {
        self.ask(&[member.to_owned()], false, |state| {
            let chunks: Vec<Result<Bytes, Error>> =
                state.snapshot.iter().cloned().map(Ok).collect();
            Ok(Snapshot {
                chunks: stream::iter(chunks).boxed(),
                version: None,
            })
        })
    }

    async fn hash(&self, member: &str, _: i64) -> Result<Option<KeyHash>, Error> {
        self.ask(&[member.to_owned()], false, |state| Ok(state.hash))
    }

    async fn key_count(&self, member: &str, _: i64) -> Result<Option<i64>, Error> {
        self.ask(&[member.to_owned()], false, |state| Ok(state.keys))
    }
}

#[cfg(test)]
mod tests;
