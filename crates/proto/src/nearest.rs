//! Which word somebody meant. Pure.

/// The candidate most like `word`, unless none is like it.
#[must_use]
pub fn nearest<'c>(word: &str, candidates: impl IntoIterator<Item = &'c str>) -> Option<&'c str> {
    let near =
        candidates.into_iter().map(|candidate| (distance(word, candidate), candidate)).min()?;
    // A third of the letters wrong is another word.
    (near.0 * 3 <= near.1.len().max(word.len())).then_some(near.1)
}

/// How many letters to put in, take out or exchange.
#[must_use]
pub fn distance(one: &str, other: &str) -> usize {
    let other: Vec<char> = other.chars().collect();
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (down, letter) in one.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = down + 1;
        for (across, candidate) in other.iter().enumerate() {
            let exchanged = diagonal + usize::from(letter != *candidate);
            diagonal = row[across + 1];
            row[across + 1] = exchanged.min(row[across] + 1).min(diagonal + 1);
        }
    }
    row[other.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_key_is_found_and_a_stranger_is_not_bent_into_one() {
        let keys = ["home", "listen", "log", "log_format", "hosts", "budget_tokens"];
        for (word, meant) in [
            ("lisen", "listen"),
            ("budget_token", "budget_tokens"),
            ("logformat", "log_format"),
            ("host", "hosts"),
        ] {
            assert_eq!(nearest(word, keys), Some(meant));
        }
        assert_eq!(nearest("colour", keys), None);
    }
}
