//! The library of `cargo xtask drill`: the faults, their order, and the encoded record of the faults.

use std::fmt;
use std::path::Path;

use anyhow::{Context, Result};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::soak::dice::Dice;

/// The number of the random stream for the order of the faults.
const ORDER: u64 = 0;
/// The number of the random stream for the victim of the first fault. Each later fault uses the next number.
const VICTIMS: u64 = 1;

/// A fault of a drill.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Fault {
    /// A node fails without a shutdown, as after a power failure.
    DeadNode,
    /// The database of a cluster reaches its quota, so etcd rejects writes.
    FullDisk,
    /// Two of three members lose their volumes and their pods.
    LostQuorum,
    /// The server certificate in a static TLS Secret has expired.
    ExpiredCertificate,
    /// A scheduled EtcdBackup writes to a bucket that does not exist.
    FailingBackup,
    /// The disk of a leader is limited to a few writes per second.
    SlowDisk,
    /// The spec of a cluster names an image that does not exist.
    BadImage,
    /// The password in the Secret of a cluster differs from the password in etcd.
    WrongSecret,
}

impl Fault {
    /// All faults.
    pub const ALL: [Self; 8] = [
        Self::DeadNode,
        Self::FullDisk,
        Self::LostQuorum,
        Self::ExpiredCertificate,
        Self::FailingBackup,
        Self::SlowDisk,
        Self::BadImage,
        Self::WrongSecret,
    ];

    /// The name of the fault in the output of the drill.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::DeadNode => "dead node",
            Self::FullDisk => "full disk",
            Self::LostQuorum => "lost quorum",
            Self::ExpiredCertificate => "expired certificate",
            Self::FailingBackup => "failing backup",
            Self::SlowDisk => "slow disk",
            Self::BadImage => "bad image",
            Self::WrongSecret => "wrong Secret",
        }
    }
}

/// The order of the faults in a drill with this seed. Each fault occurs once.
#[must_use]
pub fn order(seed: u64) -> Vec<Fault> {
    let mut dice = Dice::new(seed, ORDER);
    let mut left = Fault::ALL.to_vec();
    let mut order = Vec::new();
    while let Some(fault) = dice.one_of(&left) {
        left.retain(|one| *one != fault);
        order.push(fault);
    }
    order
}

/// A fault that a drill has injected, and the times of its first alert and of its repair.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Made {
    /// The fault.
    pub fault: Fault,
    /// The name of the object or node that the fault affects.
    pub victim: String,
    /// The time at which the drill began to inject the fault.
    pub at: Timestamp,
    /// True when the injection is complete. False while it runs, or after it was interrupted.
    pub complete: bool,
    /// The time and name of the first alert that fired after the fault. `None` until an alert fires.
    pub alert: Option<(Timestamp, String)>,
    /// The time at which `drill check` found the clusters healthy. `None` until then.
    pub healthy: Option<Timestamp>,
}

impl fmt::Display for Made {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            to,
            "{}: {}; injected at {}",
            self.fault.name(),
            self.victim,
            shown(self.at)
        )?;
        if !self.complete {
            return write!(to, "; interrupted before the fault was complete");
        }
        if let Some((at, alert)) = &self.alert {
            write!(to, "; {alert} after {} s", seconds(self.at, *at))?;
        }
        match self.healthy {
            Some(at) => write!(to, "; healthy after {} s", seconds(self.at, at)),
            None => write!(to, "; not repaired yet"),
        }
    }
}

/// The difference of two times in seconds.
#[must_use]
pub fn seconds(from: Timestamp, to: Timestamp) -> i64 {
    to.as_second() - from.as_second()
}

/// The time of day, as printed by the drill.
#[must_use]
pub fn shown(time: Timestamp) -> String {
    time.strftime("%H:%M:%S UTC").to_string()
}

/// A volume whose writes the drill limits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlowVolume {
    /// The name of the PersistentVolumeClaim (PVC), which is also the name of its pod.
    pub claim: String,
    /// The UID of the PVC.
    pub uid: String,
}

/// The state of a drill. Its file is encoded in base64, so that users do not read the faults by accident.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// The seed that determines the order of the faults.
    pub seed: u64,
    /// The factor by which alerts fire faster than with the rules of the chart.
    pub speedup: u32,
    /// The faults in the order of their injection.
    pub made: Vec<Made>,
    /// The volume whose writes are limited now.
    pub slow: Option<SlowVolume>,
}

impl Record {
    /// The record of a new drill.
    #[must_use]
    pub fn new(seed: u64, speedup: u32) -> Self {
        Self {
            seed,
            speedup,
            made: Vec::new(),
            slow: None,
        }
    }

    /// The next fault in the order. `None` after the last fault.
    #[must_use]
    pub fn next(&self) -> Option<Fault> {
        order(self.seed).get(self.made.len()).copied()
    }

    /// The last fault, if `drill check` has not found the clusters healthy since.
    #[must_use]
    pub fn unrepaired(&self) -> Option<&Made> {
        self.made.last().filter(|made| made.healthy.is_none())
    }

    /// Adds a fault to the record before the drill injects it, so that an interrupted injection can be completed.
    pub fn begin(&mut self, fault: Fault, victim: String, at: Timestamp) {
        self.made.push(Made {
            fault,
            victim,
            at,
            complete: false,
            alert: None,
            healthy: None,
        });
    }

    /// The source of random numbers that chooses the victim of the next fault.
    #[must_use]
    pub fn dice(&self) -> Dice {
        Dice::new(self.seed, VICTIMS + self.made.len() as u64)
    }

    /// Encodes the record as the text of its file.
    ///
    /// # Errors
    /// Fails if the record cannot be encoded.
    pub fn sealed(&self) -> Result<String> {
        Ok(STANDARD.encode(serde_json::to_vec(self)?) + "\n")
    }

    /// Decodes the record from the text of its file.
    ///
    /// # Errors
    /// Fails if the text is not the output of [`Self::sealed`].
    pub fn opened(text: &str) -> Result<Self> {
        let json = STANDARD
            .decode(text.trim())
            .context("the record is damaged")?;
        serde_json::from_slice(&json).context("the record is damaged")
    }

    /// Reads the record from its file.
    ///
    /// # Errors
    /// Fails if the file does not exist, because no drill is in progress, or if the record is damaged.
    pub fn read(file: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(file);
        Self::opened(&text.context("no drill is in progress: run `cargo xtask drill start`")?)
    }

    /// Writes the record to its file. The file is replaced atomically, because another process may read it at any
    /// time.
    ///
    /// # Errors
    /// Fails if the file cannot be written.
    pub fn write(&self, file: &Path) -> Result<()> {
        let next = file.with_extension("next");
        std::fs::write(&next, self.sealed()?)
            .and_then(|()| std::fs::rename(&next, file))
            .with_context(|| file.display().to_string())
    }
}

/// For each object with finalizers, a message with the command that removes the finalizers. `list` is the output of
/// `kubectl get -o json` in `namespace`.
#[must_use]
pub fn finalizer_remedies(list: &Value, namespace: &str) -> Vec<String> {
    let remedy = |object: &Value| {
        let metadata = &object["metadata"];
        let finalizers = metadata["finalizers"].as_array()?;
        let (kind, name) = (object["kind"].as_str()?, metadata["name"].as_str()?);
        let finalizers: Vec<&str> = finalizers.iter().filter_map(Value::as_str).collect();
        Some(format!(
            "{kind} {name} has the finalizer {}: run `kubectl -n {namespace} patch {} {name} --type=merge -p \
             '{{\"metadata\":{{\"finalizers\":null}}}}'`",
            finalizers.join(" and "),
            kind.to_lowercase(),
        ))
    };
    let items = list["items"].as_array().into_iter().flatten();
    items.filter_map(remedy).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn record() -> Record {
        Record {
            made: vec![Made {
                fault: Fault::BadImage,
                victim: "billing".to_owned(),
                at: Timestamp::constant(1_000, 0),
                complete: true,
                alert: Some((
                    Timestamp::constant(1_045, 0),
                    "EtcdMemberMissing".to_owned(),
                )),
                healthy: None,
            }],
            ..Record::new(7, 20)
        }
    }

    #[test]
    fn fault_order_contains_each_fault_once() {
        for seed in 0..100 {
            let order = order(seed);
            assert_eq!(order.len(), Fault::ALL.len());
            assert!(
                Fault::ALL.iter().all(|fault| order.contains(fault)),
                "{seed}"
            );
        }
    }

    #[test]
    fn fault_order_depends_only_on_seed() {
        assert_eq!(order(5), order(5));
        let first: Vec<Fault> = (0..100).map(|seed| order(seed)[0]).collect();
        assert!(
            Fault::ALL.iter().all(|fault| first.contains(fault)),
            "{first:?}"
        );
    }

    #[test]
    fn next_fault_follows_order_until_all_are_injected() {
        let mut record = Record::new(3, 20);
        let made = self::record().made[0].clone();
        for fault in order(3) {
            assert_eq!(record.next(), Some(fault));
            record.made.push(Made {
                fault,
                ..made.clone()
            });
        }
        assert_eq!(record.next(), None);
    }

    #[test]
    fn encoded_drill_record_hides_fault_names_and_decodes_unchanged() {
        let record = record();
        let sealed = record.sealed().unwrap();
        for word in ["BadImage", "billing", "EtcdMemberMissing", "fault"] {
            assert!(!sealed.contains(word), "{sealed}");
        }
        assert_eq!(Record::opened(&sealed).unwrap(), record);
        assert!(Record::opened("no record").is_err());
    }

    #[test]
    fn drill_record_is_read_from_its_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("record");
        let missing = format!("{:#}", Record::read(&file).unwrap_err());
        assert!(missing.contains("cargo xtask drill start"), "{missing}");
        record().write(&file).unwrap();
        assert_eq!(Record::read(&file).unwrap(), record());
    }

    #[test]
    fn fault_description_contains_times_of_alert_and_repair() {
        let mut made = record().made.remove(0);
        assert_eq!(
            made.to_string(),
            "bad image: billing; injected at 00:16:40 UTC; EtcdMemberMissing after 45 s; not repaired yet"
        );
        made.healthy = Some(Timestamp::constant(1_300, 0));
        assert!(
            made.to_string().ends_with("; healthy after 300 s"),
            "{made}"
        );
    }

    #[test]
    fn fault_stays_unrepaired_until_clusters_are_healthy() {
        let mut record = Record::new(3, 20);
        assert_eq!(record.unrepaired(), None);
        let (first, at) = (record.next().unwrap(), Timestamp::constant(1_000, 0));
        record.begin(first, "node-1".to_owned(), at);
        let begun = record.unrepaired().unwrap();
        assert!(begun.to_string().ends_with("complete"), "{begun}");
        assert_eq!((begun.fault, begun.complete), (first, false));
        assert_eq!(begun.victim, "node-1");
        record.made[0].complete = true;
        record.made[0].healthy = Some(at);
        assert_eq!(record.unrepaired(), None);
        assert_eq!(record.next(), Some(order(3)[1]));
    }

    #[test]
    fn remedies_name_objects_with_finalizers() {
        let list = json!({"items": [
            {"kind": "EtcdRestore", "metadata": {"name": "back", "finalizers": ["etcd.example/restore"]}},
            {"kind": "EtcdCluster", "metadata": {"name": "orders"}},
        ]});
        let found = finalizer_remedies(&list, "drill");
        assert_eq!(
            found,
            [
                "EtcdRestore back has the finalizer etcd.example/restore: run `kubectl -n drill patch etcdrestore back \
              --type=merge -p '{\"metadata\":{\"finalizers\":null}}'`"
            ]
        );
        assert!(finalizer_remedies(&Value::Null, "drill").is_empty());
    }
}
