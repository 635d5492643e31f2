//! Results of reads: an answer, or the comparison of an object with the object that the builder makes.

/// An answer, or the reason why it is missing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Seen<T> {
    /// The answer.
    Known(T),
    /// The read failed for this reason.
    Unknown(String),
}

impl<T> Seen<T> {
    /// The answer, if known.
    pub fn known(&self) -> Option<&T> {
        match self {
            Self::Known(value) => Some(value),
            Self::Unknown(_) => None,
        }
    }
}

/// A Service, PodDisruptionBudget or NetworkPolicy of the whole cluster, compared with the object that the builder
/// makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kept<T> {
    /// The object does not exist.
    Missing,
    /// The object exists, and differs from the builder's object.
    Drifted,
    /// The object equals the object that the builder makes for the state in this value.
    AsMade(T),
    /// The name is used by an object of another owner.
    Others,
}
