//! "Did you mean": the known word closest to a misspelt one. Pure.

/// The candidate closest to `word`, if one is similar enough.
#[must_use]
pub fn closest<'c>(word: &str, candidates: impl IntoIterator<Item = &'c str>) -> Option<&'c str> {
    let distances =
        candidates.into_iter().map(|candidate| (edit_distance(word, candidate), candidate));
    let (distance, candidate) = distances.min()?;
    // With more than a third of the letters wrong it is another word.
    (distance * 3 <= candidate.len().max(word.len())).then_some(candidate)
}

/// Levenshtein distance: the number of letters to insert, delete or replace.
#[must_use]
pub fn edit_distance(one: &str, other: &str) -> usize {
    let other: Vec<char> = other.chars().collect();
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (down, letter) in one.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = down + 1;
        for (across, candidate) in other.iter().enumerate() {
            let replaced = diagonal + usize::from(letter != *candidate);
            diagonal = row[across + 1];
            row[across + 1] = replaced.min(row[across] + 1).min(diagonal + 1);
        }
    }
    row[other.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn similar_word_is_suggested_and_others_are_not() {
        let keys = ["home", "listen", "log", "log_format", "hosts", "budget_tokens"];
        for (word, expected) in [
            ("lisen", "listen"),
            ("budget_token", "budget_tokens"),
            ("logformat", "log_format"),
            ("host", "hosts"),
        ] {
            assert_eq!(closest(word, keys), Some(expected));
        }
        assert_eq!(closest("colour", keys), None);
    }
}
