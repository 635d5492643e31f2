//! Results of reads: [`Seen`] for an answer that may be missing, and [`Kept`] for a comparison with the desired object.

/// An answer of the API server or of etcd, or the reason why the answer is missing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Seen<T> {
    /// The answer of the API server or of etcd.
    Known(T),
    /// The read failed for this reason.
    Unknown(String),
}

/// The empty answer, for reads that the operator has no reason to make.
impl<T: Default> Default for Seen<T> {
    fn default() -> Self {
        Self::Known(T::default())
    }
}

impl<T> Seen<T> {
    /// The answer; `None` if it is unknown.
    pub fn known(&self) -> Option<&T> {
        match self {
            Self::Known(value) => Some(value),
            Self::Unknown(_) => None,
        }
    }
}

/// A Service, PodDisruptionBudget or NetworkPolicy of the whole cluster, compared with the object that the operator
/// would build.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kept<T> {
    /// The object does not exist.
    #[default]
    Missing,
    /// The object exists, and differs from the object that the operator would build.
    Drifted,
    /// The object equals the object that the operator would build for this state.
    AsMade(T),
    /// An object of another owner has this name.
    Others,
}
