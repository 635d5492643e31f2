//! A source of random numbers that depends only on its seed.

/// SplitMix64: the same numbers for a seed on every machine, and in every release of this project.
#[derive(Clone, Debug)]
pub struct Dice(u64);

impl Dice {
    /// A source for a seed. Sources with different streams draw different numbers.
    #[must_use]
    pub fn new(seed: u64, stream: u64) -> Self {
        Self(seed ^ stream.wrapping_mul(0x2545_f491_4f6c_dd1d) ^ 0x9e37_79b9_7f4a_7c15)
    }

    /// A number below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % end.max(1)
    }

    /// True in `of` of 100 cases.
    pub fn percent(&mut self, of: u64) -> bool {
        self.below(100) < of
    }

    /// One of the values. `None` if there is none.
    pub fn one_of<T: Copy>(&mut self, values: &[T]) -> Option<T> {
        let index = usize::try_from(self.below(values.len() as u64)).ok()?;
        values.get(index).copied()
    }
}
