//! What is known of something that was read: an answer, or an object compared with what the builder makes.

/// An answer, or why there is none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Seen<T> {
    /// It was read.
    Known(T),
    /// It could not be read, and this is why.
    Unknown(String),
}

impl<T> Seen<T> {
    /// The answer, if there is one.
    pub fn known(&self) -> Option<&T> {
        match self {
            Self::Known(value) => Some(value),
            Self::Unknown(_) => None,
        }
    }
}

/// A Service or budget of the whole cluster, compared with what the builder makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kept<T> {
    /// Not there.
    Missing,
    /// There, and not as it should be.
    Drifted,
    /// There, made for this.
    AsMade(T),
    /// Somebody else's object has its name.
    Others,
}
