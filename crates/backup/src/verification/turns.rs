//! Ensures that only one EtcdBackup of a namespace is verified at a time, unless an EtcdBackup allows more. Performs
//! no I/O.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

/// The UID of the EtcdBackup that may be verified now (that has the turn), by namespace. Every other EtcdBackup of the
/// namespace waits, unless it allows concurrent verifications.
#[derive(Debug, Default)]
pub(crate) struct Turns(Mutex<HashMap<String, String>>);

impl Turns {
    /// Gives the turn to the EtcdBackup with this UID, and returns true. Returns false if another EtcdBackup of the
    /// namespace has the turn or is being verified. `running` contains the UIDs of all EtcdBackups whose status
    /// reports a running verification, oldest first.
    ///
    /// The cached status may be stale, so this process also keeps the turn in memory.
    pub(crate) fn take(
        &self,
        namespace: &str,
        uid: &str,
        running: &[String],
        exists: impl Fn(&str) -> bool,
    ) -> bool {
        let mut turns = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let oldest = running.first().map(String::as_str);
        let holder = turns.get(namespace).map(String::as_str);
        let other = oldest.or_else(|| holder.filter(|holder| exists(holder)));
        let granted = other.is_none_or(|other| other == uid);
        if granted {
            turns.insert(namespace.to_owned(), uid.to_owned());
        }
        granted
    }

    /// Called for an EtcdBackup with `spec.verification.allowConcurrent`, which needs no turn. This EtcdBackup gets the
    /// turn if no EtcdBackup has it, so that the next EtcdBackups wait until its verification has ended.
    pub(crate) fn join(&self, namespace: &str, uid: &str) {
        let mut turns = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        turns
            .entry(namespace.to_owned())
            .or_insert_with(|| uid.to_owned());
    }

    /// Ends the turn of the EtcdBackup with this UID.
    pub(crate) fn end(&self, namespace: &str, uid: &str) {
        let mut turns = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if turns.get(namespace).is_some_and(|holder| holder == uid) {
            turns.remove(namespace);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn namespace_has_one_verification_at_a_time() {
        let turns = Turns::default();
        let all = |_: &str| true;
        assert!(turns.take("prod", "a", &[], all));
        assert!(turns.take("prod", "a", &[], all));
        assert!(!turns.take("prod", "b", &[], all));
        assert!(turns.take("test", "b", &[], all));
        turns.end("prod", "b");
        assert!(!turns.take("prod", "b", &[], all));
        turns.end("prod", "a");
        assert!(turns.take("prod", "b", &[], all));
    }

    /// The EtcdBackup `b` allows concurrent verifications, so it neither waits for `a` nor ends the turn of `a`. `c`
    /// waits for `a` and for `b`.
    #[test]
    fn concurrent_verification_does_not_end_turn_of_other_etcdbackup() {
        let turns = Turns::default();
        let all = |_: &str| true;
        assert!(turns.take("prod", "a", &[], all));
        turns.join("prod", "b");
        turns.end("prod", "b");
        assert!(!turns.take("prod", "c", &[], all), "a still has the turn");
        turns.end("prod", "a");
        turns.join("prod", "b");
        assert!(!turns.take("prod", "c", &[], all), "b has the turn");
        turns.end("prod", "b");
        assert!(turns.take("prod", "c", &[], all));
    }

    #[test]
    fn verification_turn_of_deleted_etcdbackup_ends() {
        let turns = Turns::default();
        assert!(turns.take("prod", "a", &[], |_| true));
        assert!(turns.take("prod", "b", &[], |uid| uid != "a"));
    }

    #[test]
    fn new_process_gives_turn_to_first_recorded_verification() {
        let turns = Turns::default();
        let running = ["a".to_owned(), "b".to_owned()];
        assert!(!turns.take("prod", "b", &running, |_| true));
        assert!(!turns.take("prod", "c", &running, |_| true));
        assert!(turns.take("prod", "a", &running, |_| true));
    }
}
