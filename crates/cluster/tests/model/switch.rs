//! TLS changes while members run. The model covers the listeners of each member, its peer URLs in etcd's list, which
//! members can connect to these URLs, and the protocol of the clients. Only runs with `Setup::tls` contain TLS changes,
//! because a change takes many rounds.
//!
//! Two members are partitioned only if neither can connect to the other: etcd sends over a stream that either member
//! has opened (`pick` in etcd's `server/etcdserver/api/rafthttp/peer.go`).
//!
//! The user follows docs/tls.md: clients change their protocol when every member accepts both protocols. In some
//! events, the user changes TLS in one step, which the operator must refuse.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::OnceLock;

use api::cluster::{PeerListener, PeerStage, TlsPolicy, TlsStatus, peers_of};
use cluster::certificates::Noted;
use cluster::snapshot::Observed;
use cluster::switch::{Clients, Maker, Started, TlsMode, TlsRollout, next};

use crate::etcd_model::{Cluster, Config, Member};
use crate::others::{Begun, is_elsewhere};
use crate::world::{World, tell};
use crate::write::Answer;

#[path = "switch/judged.rs"]
mod judged;

/// The TLS policies that users set.
const POLICIES: [&str; 9] = [
    "null",
    r#"{"static":{"member":{"peerSecret":"p"}}}"#,
    r#"{"static":{"member":{"peerSecret":"p","serverSecret":"s"},"operatorSecret":"o"},"acceptPlaintext":true}"#,
    r#"{"static":{"member":{"peerSecret":"p","serverSecret":"s"},"operatorSecret":"o"}}"#,
    r#"{"generated":{},"acceptPlaintext":true}"#,
    r#"{"generated":{}}"#,
    r#"{"generated":{"client":false}}"#,
    r#"{"certManager":{"issuerRef":{"name":"ca"}},"acceptPlaintext":true}"#,
    r#"{"certManager":{"issuerRef":{"name":"ca"}}}"#,
];

/// The peer listener of members without TLS.
pub(crate) const PLAIN: PeerListener = (false, 2380);

fn policy(which: u8) -> Option<TlsPolicy> {
    static ALL: OnceLock<Vec<Option<TlsPolicy>>> = OnceLock::new();
    let parse = |text: &&str| serde_json::from_str(text).unwrap();
    let all = ALL.get_or_init(|| POLICIES.iter().map(parse).collect());
    all[usize::from(which) % all.len()].clone()
}

/// The observation from which the sender of the current writes made its plan.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sender {
    /// The TLS settings with which members start.
    pub(crate) at: Option<TlsPolicy>,
    /// The members' peer URLs in etcd's list.
    urls: BTreeMap<String, PeerListener>,
    /// The annotations about CAs that the sender sets on a pod.
    pub(crate) noted: Noted,
}

/// The TLS mode of the etcd in a pod, according to its flags.
#[derive(Clone, Debug)]
struct Made {
    policy: Option<TlsPolicy>,
    mode: TlsMode,
    /// The peer URLs in `--initial-cluster`.
    told: BTreeMap<String, PeerListener>,
}

/// The TLS settings of the cluster and of its members.
#[derive(Clone, Debug, Default)]
pub(crate) struct Switch {
    /// `spec.TLS`.
    wanted: Option<TlsPolicy>,
    /// `status.TLS`.
    record: Option<TlsStatus>,
    /// The TLS mode of each pod, by the pod's UID.
    made: BTreeMap<u64, Made>,
    /// UIDs of the Services that have the second port.
    second_port: BTreeSet<u64>,
    /// True if no object shows the settings with which members were started: the status was lost during a TLS change,
    /// and all pods were lost before the status was recorded again. Neither the operator nor the model handles this
    /// case.
    pub(crate) untold: bool,
    /// The issuer of the certificates that clients have and trust; `None` if clients use plain text.
    clients: Option<Maker>,
    /// The observation of the operator whose writes are being applied.
    pub(crate) sender: Sender,
}

impl Switch {
    pub(crate) fn new(first: Option<u8>) -> Self {
        let wanted = first.and_then(policy);
        let mode = TlsMode::of(wanted.as_ref());
        Self {
            clients: mode.maker.filter(|_| mode.clients == Clients::Tls),
            wanted,
            ..Self::default()
        }
    }

    pub(crate) fn wanted(&self) -> Option<&TlsPolicy> {
        self.wanted.as_ref()
    }
}

/// The number of the first TLS policy of a run: a cluster that this operator did not start has no TLS at first.
pub(crate) fn first(drawn: u8, begun: Begun) -> u8 {
    if begun == Begun::Here { drawn } else { 0 }
}

pub(crate) fn url(member: &Member) -> String {
    let (tls, port) = member.dialled;
    let scheme = if tls { "https" } else { "http" };
    format!("{scheme}://{}.ns.svc:{port}", member.name)
}

pub(crate) fn listener(url: &str) -> Option<PeerListener> {
    let (scheme, rest) = url.split_once("://")?;
    let (_, port) = rest.rsplit_once(':')?;
    Some((scheme == "https", port.parse().ok()?))
}

/// True if a member in this mode accepts the client's protocol.
fn takes(mode: TlsMode, client: Option<Maker>) -> bool {
    match client {
        None => mode.clients != Clients::Tls,
        Some(_) => mode.clients != Clients::Plain && trusts(mode.maker, client),
    }
}

/// True if certificates of these two sources trust each other. The static Secrets of the model contain certificates of
/// the CA with which cert-manager signs.
fn trusts(one: Option<Maker>, other: Option<Maker>) -> bool {
    let sources = one.zip(other);
    one == other || sources.is_some_and(|(one, other)| !one.exchanges(other))
}

impl World {
    pub(crate) fn plays_tls(&self) -> bool {
        self.setup.tls.is_some()
    }

    fn made_with(&self, uid: u64) -> TlsMode {
        self.switch
            .made
            .get(&uid)
            .map_or_else(|| TlsMode::of(None), |made| made.mode)
    }

    fn mode(&self, name: &str) -> Option<TlsMode> {
        self.pods.get(name).map(|pod| self.made_with(pod.uid))
    }

    // ---- writes of the operator ----

    /// Sets the observation of the operator that sends the following writes.
    pub(crate) fn send_as(&mut self, observed: &Observed) {
        if self.plays_authorities() {
            let certificates = &observed.certificates;
            self.switch.sender.noted = Noted {
                trust: certificates.trust(),
                certificates: None,
                authorities: certificates.authorities_now(),
            };
        }
        if !self.plays_tls() {
            return;
        }
        let rollout = observed.tls_rollout.as_ref();
        let listed = observed.members.known().into_iter();
        let listed = listed.flat_map(|list| &list.members);
        let urls = listed.filter_map(|member| {
            let url = member.peer_urls.first()?;
            let name = api::names::member_of_url(url)?;
            Some((name.to_owned(), listener(url)?))
        });
        self.switch.sender = Sender {
            at: rollout.and_then(|rollout| rollout.at.clone()),
            urls: urls.collect(),
            noted: Noted::default(),
        };
    }

    /// The peer listener of a new member, by the settings of the current sender.
    pub(crate) fn usual(&self) -> PeerListener {
        peers_of(self.switch.sender.at.as_ref()).usual()
    }

    /// The peer listener of a pod that is created before its cluster forms.
    pub(crate) fn usual_of(&self, name: &str) -> PeerListener {
        let mode = self.mode(name);
        mode.map_or(PLAIN, |mode| mode.peers.usual())
    }

    pub(crate) fn note_pod(&mut self, uid: u64, initial: &BTreeSet<String>) {
        if !self.plays_tls() {
            return;
        }
        let Sender { at, urls, .. } = self.switch.sender.clone();
        let usual = self.usual();
        let told = initial.iter().map(|name| {
            let known = urls.get(name).copied();
            (name.clone(), known.unwrap_or(usual))
        });
        let made = Made {
            mode: TlsMode::of(at.as_ref()),
            told: told.collect(),
            policy: at,
        };
        self.switch.made.insert(uid, made);
    }

    pub(crate) fn note_service(&mut self, uid: u64) {
        let stage = peers_of(self.switch.sender.at.as_ref());
        if stage.listeners().len() > 1 {
            self.switch.second_port.insert(uid);
        } else {
            self.switch.second_port.remove(&uid);
        }
    }

    pub(crate) fn record_tls(&mut self, record: &TlsStatus, over: &str) -> Answer {
        if over != self.object_version.to_string() {
            return Answer::Failed;
        }
        self.judge_record(record);
        self.object_version += 1;
        self.switch.record = Some(record.clone());
        Answer::Done(None)
    }

    // ---- connections between members ----

    /// True if `from` can connect to `to` at this URL, according to the flags of both members and the ports of the
    /// Service.
    fn dials(&self, from: TlsMode, to: &str, (tls, port): PeerListener) -> bool {
        let Some(pod) = self.pods.get(to) else {
            return false;
        };
        let mode = self.made_with(pod.uid);
        let service = self.services.get(to);
        let leads_there =
            port == PLAIN.1 || service.is_none_or(|one| self.switch.second_port.contains(&one.uid));
        let trusts = !tls || (from.peers > PeerStage::Plain && trusts(from.maker, mode.maker));
        mode.peers.listeners().contains(&(tls, port)) && trusts && leads_there
    }

    /// True if the joining member `name` reaches the member `peer` at the URL in the flags of `name`.
    pub(crate) fn finds(&self, name: &str, peer: &str) -> bool {
        if !self.plays_tls() {
            return true;
        }
        let Some(pod) = self.pods.get(name) else {
            return false;
        };
        let made = self.switch.made.get(&pod.uid);
        let told = made.and_then(|made| made.told.get(peer).copied());
        self.dials(self.made_with(pod.uid), peer, told.unwrap_or(PLAIN))
    }

    /// True if the peer URLs in the member's flags equal the peer URLs in the member list. etcd compares them at the
    /// first start.
    pub(crate) fn has_listed_peer_urls(&self, name: &str, config: &Config) -> bool {
        let made = self.pods.get(name);
        let Some(made) = made.and_then(|pod| self.switch.made.get(&pod.uid)) else {
            return true;
        };
        let mut all = config.values();
        all.all(|one| made.told.get(&one.name) == Some(&one.dialled))
    }

    /// Splits each group into parts that no connection links. `all` contains each member with its group and the
    /// configuration that it knows.
    pub(crate) fn take_apart(
        &mut self,
        cluster: &Cluster,
        all: &[(u64, String, usize, usize)],
    ) -> BTreeMap<u64, usize> {
        let mut groups: BTreeMap<u64, usize> = all.iter().map(|one| (one.0, one.2)).collect();
        let mut parts: Vec<(usize, Vec<usize>)> = Vec::new();
        for (at, (_, _, group, _)) in all.iter().enumerate() {
            let touches = |part: &(usize, Vec<usize>)| {
                part.0 == *group
                    && part.1.iter().any(|other| {
                        let (one, other) = (&all[at], &all[*other]);
                        self.reaches(cluster, one, other) || self.reaches(cluster, other, one)
                    })
            };
            let (together, apart): (Vec<_>, Vec<_>) = parts.into_iter().partition(touches);
            let mut joined: Vec<usize> = together.into_iter().flat_map(|part| part.1).collect();
            joined.push(at);
            parts = apart;
            parts.push((*group, joined));
        }
        let votes = |at: &usize| {
            let member = cluster.members().get(&all[*at].0);
            member.is_some_and(|member| !member.learner)
        };
        parts
            .sort_by_key(|(_, part)| std::cmp::Reverse(part.iter().filter(|at| votes(at)).count()));
        let mut seen = BTreeSet::new();
        for (group, part) in &parts {
            if seen.insert(*group) {
                continue;
            }
            let first = part.iter().map(|at| all[*at].0).min().unwrap_or_default();
            for at in part {
                groups.insert(all[*at].0, 10_000 + usize::try_from(first).unwrap());
            }
        }
        self.judge_parts(cluster, all, &parts);
        groups
    }

    fn reaches(
        &self,
        cluster: &Cluster,
        (_, from, _, config): &(u64, String, usize, usize),
        (to, name, _, _): &(u64, String, usize, usize),
    ) -> bool {
        if self.plays_authorities() {
            return self.have_authorities_in_common(from, name);
        }
        let known = cluster.configs[*config].get(to);
        let Some(member) = known.or_else(|| cluster.members().get(to)) else {
            return true;
        };
        let from = self.mode(from);
        from.is_some_and(|from| self.dials(from, name, member.dialled))
    }

    // ---- observation of the TLS change ----

    /// The progress of the TLS change, as the operator reads it from status and pods.
    pub(crate) fn see_switch(&self, observed: &mut Observed) {
        if !self.plays_tls() {
            return;
        }
        let token = observed.intent.as_ref().map(|intent| &intent.token);
        let made_of = |uid: &str| -> Option<&Made> { self.switch.made.get(&uid.parse().ok()?) };
        let ours = observed.pods.iter().filter(|(_, pod)| match &pod.token {
            Some(of) => Some(of) == token,
            None => pod.owned,
        });
        let (mut made, mut modes) = (BTreeMap::new(), BTreeMap::new());
        for (name, pod) in ours {
            let one = made_of(&pod.uid);
            made.insert(name.clone(), one.and_then(|one| one.policy.clone()));
            let tls = one.map_or_else(|| TlsMode::of(None), |one| one.mode);
            modes.insert(name.clone(), tls);
        }
        let record = self.switch.record.as_ref();
        let record = record.filter(|record| Some(&record.token) == token);
        let wanted = self.switch.wanted.clone();
        let record = record.cloned();
        let started = Started {
            record,
            made,
            modes,
        };
        let mut rollout = TlsRollout::of(&started, wanted.as_ref());
        if let Some(next) = &mut rollout.next
            && TlsMode::of(next.to.as_ref()).maker.is_some()
        {
            let faults = observed.tls.faults.iter();
            next.faults = faults
                .filter(|fault| fault.concerns_members())
                .cloned()
                .collect();
        }
        let at = TlsMode::of(rollout.at.as_ref());
        for pod in observed.pods.values_mut() {
            let tls = made_of(&pod.uid).map_or_else(|| TlsMode::of(None), |one| one.mode);
            if tls != at {
                pod.difference.pod = Some("it was started with other TLS settings".to_owned());
            }
        }
        let second = at.peers.listeners().len() > 1;
        for service in observed.services.values_mut() {
            let uid: u64 = service.uid.parse().unwrap();
            service.drifted |= self.switch.second_port.contains(&uid) != second;
        }
        observed.tls_rollout = Some(rollout);
    }

    // ---- expectations of the user ----

    /// The recorded TLS settings, if they equal the settings of the spec and all members serve with them.
    fn ready(&self) -> Option<TlsMode> {
        let record = self.switch.record.as_ref()?;
        let mode = TlsMode::of(record.policy().as_ref());
        let wanted = TlsMode::of(self.switch.wanted.as_ref()) == mode;
        let token = &self.intent.as_ref()?.token;
        let all = self.recorded()?.members();
        let serves = |member: &Member| {
            let pod = self.pods.get(&member.name);
            pod.is_some_and(|pod| pod.shown.ready && self.made_with(pod.uid) == mode)
        };
        let settled = wanted && record.token == *token && !all.is_empty();
        (settled && all.values().all(serves)).then_some(mode)
    }

    /// The user sets another TLS policy, either as documented or in one forbidden step.
    pub(crate) fn switch_tls(&mut self, which: u8) {
        let unrecorded = self.switch.record.is_none();
        if !self.plays_tls() || self.cluster_id.is_none() || unrecorded || self.deleting {
            return;
        }
        let to = policy(which);
        let target = TlsMode::of(to.as_ref());
        let fits = match target.clients {
            Clients::Plain => self.switch.clients.is_none(),
            Clients::Tls => trusts(self.switch.clients, target.maker),
            Clients::Both => takes(target, self.switch.clients),
        };
        if !fits {
            let Some(mode) = self.ready() else {
                return;
            };
            let clients = target.maker.filter(|_| target.clients == Clients::Tls);
            if takes(mode, clients) {
                self.switch.clients = clients;
                tell!(self, "all clients now use {clients:?}");
            } else if next(self.switch.wanted.as_ref(), to.as_ref()).is_ok() {
                return;
            }
        }
        self.switch.wanted = to;
        self.object_version += 1;
        tell!(self, "the user wants that members {}", target.words());
    }

    /// The user reverts a step of the TLS change that the operator refuses.
    pub(crate) fn give_in(&mut self) {
        let at = self.switch.record.as_ref().and_then(TlsStatus::policy);
        let recorded = self.switch.record.is_some();
        if recorded && next(at.as_ref(), self.switch.wanted.as_ref()).is_err() {
            self.switch.wanted = at.map(|at| TlsPolicy {
                peer_stage: None,
                ..at
            });
            self.object_version += 1;
        }
    }

    /// The user has created the EtcdCluster again, with new clients.
    pub(crate) fn begin_tls_anew(&mut self) {
        let mode = TlsMode::of(self.switch.wanted.as_ref());
        self.switch.record = None;
        self.switch.clients = mode.maker.filter(|_| mode.clients == Clients::Tls);
    }

    /// True if a user may recreate the EtcdCluster without its status. During a TLS change, this requires pods that
    /// show the settings with which members were started.
    pub(crate) fn tls_can_be_told(&self) -> bool {
        let settled = || self.switch.record.is_none() || self.ready().is_some();
        !self.plays_tls() || settled() || !self.wishes.hibernate && self.pods_tell()
    }

    fn pods_tell(&self) -> bool {
        let token = self.intent.as_ref().map(|intent| &intent.token);
        let mut pods = self.pods.iter().filter(|(name, _)| !is_elsewhere(name));
        pods.any(|(_, pod)| token.is_none_or(|token| pod.start.token == *token))
    }

    pub(crate) fn lose_tls_record(&mut self) {
        self.switch.record = None;
    }

    pub(crate) fn notice_silence(&mut self) {
        let lost = self.plays_tls() && self.switch.record.is_none() && self.memory.thrown;
        self.switch.untold |= lost && !self.pods_tell();
    }

    pub(crate) fn talks_as_wanted(&self) -> bool {
        if !self.plays_tls() {
            return true;
        }
        let wanted = TlsMode::of(self.switch.wanted.as_ref());
        let record = self.switch.record.as_ref();
        let recorded = record.is_some_and(|one| TlsMode::of(one.policy().as_ref()) == wanted);
        let members = self.recorded().into_iter();
        let mut members = members.flat_map(|all| all.members().values());
        recorded
            && members.all(|one| {
                one.dialled == wanted.peers.usual() && self.mode(&one.name) == Some(wanted)
            })
    }
}
