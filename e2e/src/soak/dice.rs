//! Random numbers that depend only on a seed.

/// Random numbers from the algorithm SplitMix64. The same seed gives the same numbers on every machine and in every
/// release.
#[derive(Clone, Debug)]
pub struct Dice(u64);

impl Dice {
    /// Starts a random sequence. Different streams of the same seed give different numbers.
    #[must_use]
    pub fn new(seed: u64, stream: u64) -> Self {
        Self(seed ^ stream.wrapping_mul(0x2545_f491_4f6c_dd1d) ^ 0x9e37_79b9_7f4a_7c15)
    }

    /// A random number from 0 to `end` - 1.
    pub fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % end.max(1)
    }

    /// True with a probability of `of` percent.
    pub fn percent(&mut self, of: u64) -> bool {
        self.below(100) < of
    }

    /// A random element. `None` if `values` is empty.
    pub fn one_of<T: Copy>(&mut self, values: &[T]) -> Option<T> {
        let index = usize::try_from(self.below(values.len() as u64)).ok()?;
        values.get(index).copied()
    }
}
