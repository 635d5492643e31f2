//! A random choice that depends only on a seed.

/// The random number generator SplitMix64 (Steele, Lea, Flood 2014), which gives the same numbers on every machine.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// A random number from 0 to `end` - 1. `end` must be greater than 0.
    fn below(&mut self, end: usize) -> usize {
        // `try_from` cannot fail, because the remainder is less than `end`, which is a `usize`.
        usize::try_from(self.next() % end as u64).unwrap_or_default()
    }

    /// Up to `count` different items in random order.
    pub(crate) fn choose<T>(&mut self, mut items: Vec<T>, count: usize) -> Vec<T> {
        let mut chosen = Vec::new();
        while chosen.len() < count && !items.is_empty() {
            let index = self.below(items.len());
            chosen.push(items.swap_remove(index));
        }
        chosen
    }
}

/// The number of items to choose from each group, `count` in total. The shares are equal, unless a group is smaller
/// than its share: the larger groups then get more items.
pub(crate) fn shares(sizes: &[usize], count: usize) -> Vec<usize> {
    let mut shares = vec![0; sizes.len()];
    let mut left = count.min(sizes.iter().sum());
    while left > 0 {
        for (share, size) in shares.iter_mut().zip(sizes) {
            if left > 0 && *share < *size {
                *share += 1;
                left -= 1;
            }
        }
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_generator_matches_reference_values() {
        // The two expected numbers come from the reference implementation of SplitMix64 with the seed 1234567.
        let mut random = Random(1_234_567);
        assert_eq!(random.next(), 6_457_827_717_110_365_317);
        assert_eq!(random.next(), 3_203_168_211_198_807_973);
    }

    #[test]
    fn same_seed_chooses_same_sample() {
        let choose = |seed| Random(seed).choose((0..1000).collect(), 10);
        assert_eq!(choose(7), choose(7));
        assert_ne!(choose(7), choose(8));
    }

    #[test]
    fn sample_has_no_item_twice() {
        let mut chosen = Random(1).choose((0..20).collect(), 50);
        chosen.sort_unstable();
        assert_eq!(chosen, (0..20).collect::<Vec<_>>());
    }

    #[test]
    fn sample_shares_are_equal_unless_group_is_small() {
        assert_eq!(shares(&[100, 100, 100], 7), [3, 2, 2]);
        assert_eq!(shares(&[1, 100, 100], 7), [1, 3, 3]);
        assert_eq!(shares(&[1, 2], 60), [1, 2]);
    }
}
