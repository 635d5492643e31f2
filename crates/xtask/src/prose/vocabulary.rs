//! Words that docs/contributing/language.md replaces, and how often a text uses them.

use std::collections::BTreeMap;

use super::passage::readable;

/// A word or phrase of the old vocabulary, and the term that replaces it. Each form of a word has its own row.
const OLD: &[(&str, &str)] = &[
    ("told", "reported, logged, recorded"),
    ("tell", "report, log, distinguish"),
    ("tells", "reports, logs, distinguishes"),
    ("nobody", "name the subject"),
    ("somebody", "name the subject"),
    ("whoever", "name the subject"),
    ("someone", "name the subject"),
    ("anyone", "name the subject"),
    ("whom", "name the object"),
    ("whose", "ownership, controller reference"),
    ("anybody", "name the subject"),
    ("those who", "name the subject"),
    ("one that", "name the thing"),
    ("ones that", "name the things"),
    ("what is wanted", "desired state"),
    ("what is let in", "admission"),
    ("what it is made of", "provenance"),
    ("made of", "provenance"),
    ("wish", "desired state, spec"),
    ("beside", "concurrent, next to"),
    ("two operators at once", "concurrent operators"),
    ("in the same moment", "concurrently"),
    ("sooner or later", "eventually"),
    ("for ever", "indefinitely"),
    ("for good", "permanently"),
    ("come back", "return"),
    ("comes back", "returns"),
    ("gives up", "times out, cancels"),
    ("give up", "time out, cancel"),
    ("taken back", "revoked, rolled back"),
    ("stands", "is, is recorded in"),
    ("stand", "are, are recorded in"),
    ("late", "fenced, delayed"),
    ("who leads", "leader"),
    ("led past", "removed from endpoints"),
    ("passed by", "removed from endpoints"),
    ("passes by", "removes from endpoints"),
    ("set aside", "drained"),
    ("lead clients", "endpoints, Service selector"),
    ("be found", "endpoints"),
    ("a look", "reconcile"),
    ("the look", "reconcile"),
    ("next look", "reconcile"),
    ("each look", "reconcile"),
    ("its look", "reconcile"),
    ("that look", "reconcile"),
    ("this look", "reconcile"),
    ("looks at", "reconciles, checks"),
    ("look again", "reconcile, requeue"),
    ("looked at", "reconciled, checked"),
    ("recall", "cache"),
    ("stir", "invalidate"),
    ("old reading", "stale snapshot"),
    ("turn around", "roll back"),
    ("go back", "roll back"),
    ("goes back", "rolls back"),
    ("the turn", "cutover"),
    ("one after the other", "rolling update"),
    ("followed by another", "replaced"),
    ("goes", "fails, is deleted"),
    ("is gone", "is deleted, is missing"),
    ("are gone", "are deleted, are missing"),
    ("is away", "is missing"),
    ("wait longer", "back off"),
    ("waits longer", "backs off"),
    ("ask again", "retry"),
    ("asked again", "retried"),
    ("says no", "rejects, denies"),
    ("let in", "authorized, admitted"),
    ("asked twice", "idempotent"),
    ("anew", "again"),
    ("put right", "repaired, resolved"),
    ("taken for", "treated as"),
    ("last words", "container exit reason"),
    ("volume claim", "persistent volume claim (PVC)"),
    ("volume claims", "persistent volume claims (PVCs)"),
    ("comes to its end", "completes"),
    ("come to their end", "complete"),
];

/// The term that replaces a word of the old vocabulary.
pub(crate) fn replacement(old: &str) -> Option<&'static str> {
    let row = OLD.iter().find(|(word, _)| *word == old);
    row.map(|(_, new)| *new)
}

/// Counts the words of the old vocabulary in a text, without code in backticks.
pub(crate) fn uses(text: &str) -> BTreeMap<&'static str, usize> {
    let words = words(text);
    let counts = OLD.iter().map(|(old, _)| (*old, count(&words, old)));
    counts.filter(|(_, count)| *count > 0).collect()
}

/// The words of a text in lower case, with a space before and after each word, so that a search finds whole words.
fn words(text: &str) -> String {
    let prose: Vec<&str> = text.split('`').step_by(2).collect();
    let text = readable(&prose.join(" . ")).to_lowercase();
    let words = text.split(|c: char| !c.is_alphanumeric() && c != '_');
    let words: Vec<&str> = words.filter(|word| !word.is_empty()).collect();
    format!(" {} ", words.join(" "))
}

fn count(words: &str, phrase: &str) -> usize {
    words.matches(&format!(" {phrase} ")).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_words_are_counted_as_whole_words_in_any_case() {
        let found = uses("Nobody told the bystander. It is told, and `told` is code.");
        assert_eq!(found, BTreeMap::from([("nobody", 1), ("told", 2)]));
    }

    #[test]
    fn old_phrase_is_counted_if_punctuation_follows() {
        assert_eq!(uses("The pod is gone."), BTreeMap::from([("is gone", 1)]));
    }

    #[test]
    fn replacement_of_old_word_is_known() {
        assert_eq!(replacement("is away"), Some("is missing"));
        assert_eq!(replacement("quorum"), None);
    }

    #[test]
    fn vocabulary_has_no_duplicates() {
        let distinct: BTreeMap<_, _> = OLD.iter().copied().collect();
        assert_eq!(distinct.len(), OLD.len());
    }
}
