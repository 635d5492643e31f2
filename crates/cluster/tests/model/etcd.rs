//! A model of one etcd cluster: Raft's logs, elections, membership changes, and rejected requests.
//!
//! A log is represented by its last entry: by Raft's log matching property, the term and the index of an entry identify
//! all entries before it. Of the leaders that Raft allows, the model elects the one with the shortest log, so that
//! every write that can be lost is lost. The model rejects the same requests as `mayAddMember`, `mayRemoveMember` and
//! `mayPromoteMember` in etcd's `server/etcdserver/server.go`.

use std::collections::BTreeMap;

use api::cluster::PeerListener;

/// The position of a log entry. Positions are ordered as Raft compares logs: by term, then by index.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Spot {
    pub(crate) term: usize,
    pub(crate) index: u64,
}

/// A member in a configuration of the etcd cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Member {
    pub(crate) name: String,
    pub(crate) learner: bool,
    /// True if the member has started once, and a quorum has committed its client URLs.
    pub(crate) joined: bool,
    /// The peer URL of the member, to which the other members connect.
    pub(crate) dialled: PeerListener,
}

pub(crate) type Config = BTreeMap<u64, Member>;

/// The content of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Data {
    pub(crate) token: String,
    pub(crate) member: u64,
    /// The last entry of the member's log.
    pub(crate) last: Spot,
    /// The newest term that the member knows, for example because it voted in that term.
    pub(crate) term: usize,
    /// The newest configuration that the member knows, as an index into [`Cluster::configs`].
    pub(crate) config: usize,
    /// True if the member knows that it was removed, so that etcd exits after each start.
    pub(crate) removed: bool,
    /// True if etcd cannot read the data.
    pub(crate) corrupt: bool,
}

impl Data {
    pub(crate) fn empty(token: &str, member: u64, config: usize) -> Self {
        Self {
            token: token.to_owned(),
            member,
            last: Spot::default(),
            term: 0,
            config,
            removed: false,
            corrupt: false,
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Process {
    pub(crate) name: String,
    /// The network group of the process: processes in the same group reach each other.
    pub(crate) group: usize,
    /// The time at which the process joined its network group.
    pub(crate) since: u64,
    /// The term in which the process is the leader; `None` if it is not the leader.
    pub(crate) leads: Option<usize>,
}

#[derive(Clone, Debug)]
pub(crate) struct Cluster {
    pub(crate) id: u64,
    /// All configurations so far. A change is either committed at once or not at all, so the last configuration is the
    /// newest.
    pub(crate) configs: Vec<Config>,
    /// For each term, the last entry of the elected leader at its election.
    pub(crate) terms: Vec<Spot>,
    pub(crate) running: BTreeMap<u64, Process>,
    /// For each follower, the log index up to which its log certainly equals the leader's log. `isLearnerReady` uses
    /// this index.
    pub(crate) matched: BTreeMap<u64, u64>,
    /// True if a leader was ever elected.
    pub(crate) formed: bool,
    /// The newest write that was acknowledged to a client.
    pub(crate) acknowledged: Option<Spot>,
}

/// How long members must be connected before etcd accepts a change (5 s in etcd, 2 ticks here).
const CONNECTED: u64 = 2;

pub(crate) fn quorum(config: &Config) -> usize {
    quorum_of(voters(config).count())
}

fn quorum_of(voters: usize) -> usize {
    voters / 2 + 1
}

pub(crate) fn voters(config: &Config) -> impl Iterator<Item = (&u64, &Member)> {
    config.iter().filter(|(_, member)| !member.learner)
}

impl Cluster {
    pub(crate) fn new(id: u64, first: Config) -> Self {
        Self {
            id,
            configs: vec![first],
            terms: vec![Spot::default()],
            running: BTreeMap::new(),
            matched: BTreeMap::new(),
            formed: false,
            acknowledged: None,
        }
    }

    /// The members in the newest configuration.
    pub(crate) fn members(&self) -> &Config {
        self.configs.last().unwrap()
    }

    pub(crate) fn voters(&self) -> impl Iterator<Item = (&u64, &Member)> {
        voters(self.members())
    }

    pub(crate) fn by_name(&self, name: &str) -> Option<u64> {
        let found = self
            .members()
            .iter()
            .find(|(_, member)| member.name == name);
        found.map(|(id, _)| *id)
    }

    /// True if a log that ends at `last` contains the entry `entry`.
    pub(crate) fn contains(&self, last: Spot, entry: Spot) -> bool {
        let mut at = last;
        while at.term > entry.term {
            at = self.terms[at.term];
        }
        at.term == entry.term && at.index >= entry.index
    }

    /// The leader of this group; `None` if the group has no leader. CheckQuorum ensures that a group with a leader
    /// contains a quorum.
    pub(crate) fn leader(&self, group: usize) -> Option<u64> {
        let leads = |process: &&Process| process.group == group && process.leads.is_some();
        let mut leaders = self.running.iter().filter(|(_, process)| leads(process));
        leaders.next().map(|(id, _)| *id)
    }

    /// The group that has a leader. At most one group has a leader.
    pub(crate) fn serving(&self) -> Option<usize> {
        let leads = |process: &&Process| process.leads.is_some();
        self.running
            .values()
            .find(leads)
            .map(|process| process.group)
    }

    /// True if the member runs and reaches the leader.
    pub(crate) fn is_up(&self, id: u64) -> bool {
        let group = self.running.get(&id).map(|process| process.group);
        group.is_some() && group == self.serving()
    }

    fn connected(&self, id: u64, group: usize, now: u64) -> bool {
        let of = self
            .running
            .get(&id)
            .filter(|process| process.group == group);
        of.is_some_and(|process| now >= process.since + CONNECTED)
    }

    /// Applies the rules of `mayAddMember` and `--max-learners`.
    pub(crate) fn refuses_addition(
        &self,
        config: &Config,
        group: usize,
        (learner, most): (bool, usize),
        now: u64,
    ) -> Option<&'static str> {
        let (all, started) = started(config);
        let one_alone = all == 1 && started == 1;
        if !learner && !one_alone && started < quorum_of(all + 1) {
            return Some("not enough started members");
        }
        if !voters(config).all(|(id, _)| self.connected(*id, group, now)) {
            return Some("unhealthy cluster");
        }
        if learner && config.len() - all >= most {
            return Some("too many learner members in cluster");
        }
        None
    }

    /// Applies the rules of `mayRemoveMember`. `asked`: the member that receives the request.
    pub(crate) fn refuses_removal(
        &self,
        config: &Config,
        (id, asked): (u64, u64),
        group: usize,
        now: u64,
    ) -> Option<&'static str> {
        if config.get(&id).is_none_or(|member| member.learner) {
            return None;
        }
        let (all, joined) = started(config);
        let others = joined - usize::from(config[&id].joined);
        if all == 1 || others < (all - 1) / 2 + 1 {
            return Some("not enough started members");
        }
        let reached = self
            .running
            .get(&id)
            .is_some_and(|process| process.group == group);
        if id != asked && !reached {
            return None;
        }
        let active = voters(config).filter(|(id, _)| self.connected(**id, group, now));
        (active.count() < 2 + (all - 1) / 2).then_some("unhealthy cluster")
    }

    /// Applies the rules of `mayPromoteMember` and `isLearnerReady`.
    pub(crate) fn refuses_promotion(
        &self,
        config: &Config,
        id: u64,
        leader: Spot,
    ) -> Option<&'static str> {
        if config.get(&id).is_none_or(|member| !member.learner) {
            return Some("can only promote a learner member");
        }
        let matched = self.matched.get(&id).copied().unwrap_or_default();
        if matched * 10 < leader.index * 9 {
            return Some("can only promote a learner member which is in sync with leader");
        }
        let (all, joined) = started(config);
        (joined + 1 < quorum_of(all + 1)).then_some("not enough started members")
    }
}

/// The number of voters, and the number of voters that have started.
fn started(config: &Config) -> (usize, usize) {
    let joined = voters(config).filter(|(_, member)| member.joined);
    (voters(config).count(), joined.count())
}

/// The members' data by member ID, during a tick of the cluster.
pub(crate) type Logs<'a> = BTreeMap<u64, &'a mut Data>;

/// The result of one tick for the processes of a network group.
#[derive(Default)]
pub(crate) struct Moved {
    pub(crate) elected: Option<u64>,
    /// True if the log contains the previous acknowledged write; `None` if no write of a client was acknowledged.
    pub(crate) acknowledged: Option<bool>,
}

impl Cluster {
    /// One tick of a group: elects a leader, replicates the log and, if `writes` is true, accepts a write of a client.
    pub(crate) fn step(
        &mut self,
        (group, now): (usize, u64),
        logs: &mut Logs,
        lagging: &[u64],
        writes: bool,
    ) -> Moved {
        let mut moved = Moved::default();
        if !self.keeps_leader(group, logs) {
            moved.elected = self.elect(group, logs);
        }
        let Some(leader) = self.leader(group) else {
            return moved;
        };
        self.formed = true;
        self.replicate(leader, logs, lagging);
        self.publish(leader, logs, now);
        if writes {
            let spot = self.append(leader, logs, lagging, None);
            let previous = self.acknowledged.replace(spot);
            moved.acknowledged = Some(previous.is_none_or(|before| self.contains(spot, before)));
        }
        moved
    }

    /// Deposes leaders without a quorum in their group (CheckQuorum), and leaders of an older term. Returns true if a
    /// leader remains.
    fn keeps_leader(&mut self, group: usize, logs: &Logs) -> bool {
        let inside = |process: &Process| process.group == group;
        let mut kept = false;
        let leaders = self.running.iter().filter(|(_, process)| inside(process));
        let leaders: Vec<(u64, usize)> = leaders
            .filter_map(|(id, process)| Some((*id, process.leads?)))
            .collect();
        for (id, term) in leaders {
            let config = &self.configs[logs[&id].config];
            let followers =
                voters(config).filter(|(id, _)| self.running.get(id).is_some_and(inside));
            let terms: Vec<usize> = followers.map(|(id, _)| logs[id].term).collect();
            let stays =
                !kept && terms.len() >= quorum(config) && terms.iter().all(|one| *one <= term);
            let stays = stays && config.get(&id).is_some_and(|member| !member.learner);
            kept |= stays;
            if !stays {
                self.running.get_mut(&id).unwrap().leads = None;
            }
        }
        kept
    }

    /// Of the members that can be elected, elects the member with the shortest log, so that every write that can be
    /// lost is lost.
    fn elect(&mut self, group: usize, logs: &mut Logs) -> Option<u64> {
        let inside = |id: &u64| {
            self.running
                .get(id)
                .is_some_and(|process| process.group == group)
        };
        let present: Vec<u64> = logs.keys().copied().filter(inside).collect();
        let wins = |id: &&u64| self.votes(**id, &present, logs).is_some();
        let winner = *present.iter().filter(wins).min_by_key(|id| logs[id].last)?;
        let voted = self.votes(winner, &present, logs).unwrap();
        self.crown(winner, &voted, logs);
        Some(winner)
    }

    /// The members of the group that vote for this candidate; `None` if they are fewer than a quorum.
    fn votes(&self, id: u64, present: &[u64], logs: &Logs) -> Option<Vec<u64>> {
        let views = present.iter().map(|id| (*id, logs[id].last));
        self.electors(id, logs[&id].last, logs[&id].config, views)
    }

    /// The members that vote for this candidate; `None` if they are fewer than a quorum. By Raft's rule, a voter never
    /// votes for a log that is shorter than its own. The candidate counts the votes by the configuration that it knows.
    pub(crate) fn electors(
        &self,
        id: u64,
        last: Spot,
        config: usize,
        others: impl Iterator<Item = (u64, Spot)>,
    ) -> Option<Vec<u64>> {
        let config = &self.configs[config];
        let votes = |id: &u64| config.get(id).is_some_and(|member| !member.learner);
        if !votes(&id) {
            return None;
        }
        let granted: Vec<u64> = others
            .filter(|(id, log)| votes(id) && *log <= last)
            .map(|(id, _)| id)
            .collect();
        (granted.len() >= quorum(config)).then_some(granted)
    }

    /// Replicates the leader's log. Members in `lagging` get an entry only if it reaches no quorum without them.
    fn replicate(&mut self, leader: u64, logs: &mut Logs, lagging: &[u64]) {
        let (last, config, term) = {
            let log = &logs[&leader];
            (log.last, log.config, self.running[&leader].leads.unwrap())
        };
        let group = self.running[&leader].group;
        let members = &self.configs[config];
        let reached = members
            .keys()
            .filter(|id| self.running.get(id).is_some_and(|one| one.group == group));
        let (slow, fast): (Vec<u64>, Vec<u64>) =
            reached.partition(|id| lagging.contains(id) && **id != leader);
        let voting = |id: &&u64| !members[*id].learner;
        let missing = quorum(members).saturating_sub(fast.iter().filter(voting).count());
        let needed: Vec<u64> = slow.iter().filter(voting).take(missing).copied().collect();
        for id in fast.iter().chain(&needed) {
            let log = logs.get_mut(id).unwrap();
            (log.last, log.config, log.term) = (last, config, term);
            self.matched.insert(*id, last.index);
        }
        for id in &slow {
            logs.get_mut(id).unwrap().term = term;
        }
    }

    /// Started followers publish their client URLs, and removed members learn that they were removed.
    fn publish(&mut self, leader: u64, logs: &mut Logs, now: u64) {
        let (config, last) = (logs[&leader].config, logs[&leader].last);
        let group = self.running[&leader].group;
        for (id, process) in &self.running {
            if process.group != group {
                continue;
            }
            let log = logs.get_mut(id).unwrap();
            match self.configs[config].get_mut(id) {
                Some(member) => member.joined |= log.last == last && now > process.since,
                None => log.removed = true,
            }
        }
    }

    /// Commits one entry: a write or a new configuration.
    pub(crate) fn append(
        &mut self,
        leader: u64,
        logs: &mut Logs,
        lagging: &[u64],
        config: Option<Config>,
    ) -> Spot {
        let term = self.running[&leader].leads.unwrap();
        let log = logs.get_mut(&leader).unwrap();
        log.last = Spot {
            term,
            index: log.last.index + 1,
        };
        let spot = log.last;
        // etcd applies a change of members only after a quorum of the previous configuration has committed the change.
        self.replicate(leader, logs, lagging);
        if let Some(config) = config {
            self.configs.push(config);
            let newest = self.configs.len() - 1;
            for log in logs.values_mut().filter(|log| log.last == spot) {
                log.config = newest;
            }
        }
        spot
    }

    /// Replicates the log, and transfers leadership to the member `to` if a quorum votes for it.
    pub(crate) fn hand_over(&mut self, from: u64, to: u64, logs: &mut Logs, lagging: &[u64]) {
        self.replicate(from, logs, lagging);
        let group = self.running[&from].group;
        let inside = |id: &u64| {
            self.running
                .get(id)
                .is_some_and(|process| process.group == group)
        };
        let present: Vec<u64> = logs.keys().copied().filter(inside).collect();
        if let Some(voted) = self.votes(to, &present, logs) {
            self.running.get_mut(&from).unwrap().leads = None;
            self.crown(to, &voted, logs);
        }
    }

    fn crown(&mut self, winner: u64, voted: &[u64], logs: &mut Logs) {
        let term = self.terms.len();
        self.terms.push(logs[&winner].last);
        for id in voted {
            logs.get_mut(id).unwrap().term = term;
        }
        self.running.get_mut(&winner).unwrap().leads = Some(term);
        self.matched.clear();
        let log = logs.get_mut(&winner).unwrap();
        log.last = Spot {
            term,
            index: log.last.index + 1,
        };
    }
}
