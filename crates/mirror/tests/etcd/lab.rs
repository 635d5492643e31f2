//! A source, a destination, and the tasks of mirrors between them.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use etcd::testing::{EtcdProcess, Programs, Start};
use etcd_client::{Client, GetOptions};
use mirror::checkpoint::Identity;
use mirror::ends::{End, Ends};
use mirror::mapping::Mapping;
use mirror::progress::{Monitor, Progress};
use mirror::step::Limits;
use mirror::task::Task;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

const DEADLINE: Duration = Duration::from_mins(1);
/// The keys with the records of mirrors.
const RECORDS: &[u8] = b"etcd.database.coreos.com/mirror/";

pub(crate) type Keys = BTreeMap<Vec<u8>, Vec<u8>>;

/// Two etcd processes.
pub(crate) struct Lab {
    pub(crate) source: EtcdProcess,
    pub(crate) destination: EtcdProcess,
}

/// The task of a mirror.
pub(crate) struct Running {
    pub(crate) monitor: Monitor,
    stop: CancellationToken,
    handle: JoinHandle<()>,
    /// The sender is kept, because the task ends when its sender is dropped.
    _ends: watch::Sender<Ends>,
}

impl Running {
    pub(crate) fn progress(&self) -> Progress {
        self.monitor.read()
    }

    /// Stops the task, as a shutdown of the operator does.
    pub(crate) async fn stop(self) -> Progress {
        self.stop.cancel();
        self.handle.await.unwrap();
        self.monitor.read()
    }
}

pub(crate) async fn start_etcd(minor: &str) -> EtcdProcess {
    let start = Start {
        flags: vec!["--unsafe-no-fsync".to_owned()],
        ..Start::default()
    };
    EtcdProcess::start(&Programs::find(minor), &start).await
}

pub(crate) async fn client(etcd: &EtcdProcess) -> Client {
    Client::connect([etcd.client_url.as_str()], None)
        .await
        .unwrap()
}

impl Lab {
    /// Starts a source and a destination with these minor releases.
    pub(crate) async fn new(source: &str, destination: &str) -> Self {
        Self {
            source: start_etcd(source).await,
            destination: start_etcd(destination).await,
        }
    }

    pub(crate) fn destination_end(&self) -> End {
        End {
            endpoints: vec![self.destination.client_url.clone()],
            ..End::default()
        }
    }

    /// Starts the task of the mirror with this UID.
    pub(crate) fn mirror(&self, uid: &str, pair: (&str, &str)) -> Running {
        let source = End {
            endpoints: vec![self.source.client_url.clone()],
            ..End::default()
        };
        self.mirror_from(source, uid, pair)
    }

    /// Like [`Self::mirror`], with this connection to the source.
    pub(crate) fn mirror_from(&self, source: End, uid: &str, (from, to): (&str, &str)) -> Running {
        let ends = Ends {
            source,
            destination: self.destination_end(),
            limits: Limits::of_destination(None, None),
            accepted: None,
        };
        let (sender, receiver) = watch::channel(ends);
        let (monitor, stop) = (Monitor::default(), CancellationToken::new());
        let task = Task {
            identity: Identity {
                uid: uid.to_owned(),
                name: format!("test/{uid}"),
                mapping: Mapping::new(from, to),
            },
            ends: receiver,
            monitor: monitor.clone(),
            stop: stop.clone(),
            changed: Box::new(|| {}),
        };
        Running {
            monitor,
            stop,
            handle: tokio::spawn(task.run()),
            _ends: sender,
        }
    }

    /// Waits until the destination has exactly the keys of the source.
    pub(crate) async fn await_equal(&self, (from, to): (&str, &str)) {
        let mut keys = (Keys::new(), Keys::new());
        let begun = Instant::now();
        while begun.elapsed() < DEADLINE {
            let found = keys_below(&self.source, from).await.into_iter();
            let expected = found.map(|(key, value)| {
                let rest = &key[from.len()..];
                ([to.as_bytes(), rest].concat(), value)
            });
            keys = (expected.collect(), keys_below(&self.destination, to).await);
            if keys.0 == keys.1 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let (expected, found) = keys;
        let missing = expected.iter().filter(|(key, _)| !found.contains_key(*key));
        let surplus = found.iter().filter(|(key, _)| !expected.contains_key(*key));
        panic!(
            "{} keys are missing and {} are surplus",
            missing.count(),
            surplus.count()
        );
    }
}

/// Waits until a condition holds.
pub(crate) async fn until(what: &str, condition: impl Fn() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < DEADLINE, "{what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The keys with a prefix, without the records of mirrors.
pub(crate) async fn keys_below(etcd: &EtcdProcess, prefix: &str) -> Keys {
    let options = GetOptions::new().with_prefix();
    // The client limits a response to 4 MiB, which is enough for all keys with one prefix in these tests.
    let mut found = client(etcd).await.get(prefix, Some(options)).await.unwrap();
    let entries = found.take_kvs().into_iter();
    let entries = entries.map(etcd_client::KeyValue::into_key_value);
    entries
        .filter(|(key, _)| !key.starts_with(RECORDS))
        .collect()
}
