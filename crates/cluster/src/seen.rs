//! The result of a read: an answer, or an object compared with the builder's object.

/// An answer, or why it is missing.
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

/// A Service or PodDisruptionBudget of the whole cluster, compared with the builder's object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kept<T> {
    /// Does not exist.
    Missing,
    /// Exists and differs from the builder's object.
    Drifted,
    /// Exists as the builder makes it, for this value.
    AsMade(T),
    /// Another owner's object has its name.
    Others,
}
