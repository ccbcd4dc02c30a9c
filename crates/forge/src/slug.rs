//! Turns a session's title into a part of its branch name.

// Long enough to be meaningful, short enough that `harvest/<slug>-<id>` fits on a line.
const MAX_BYTES: usize = 40;

/// The title in lower-case letters, digits and single hyphens, truncated at a word boundary where
/// possible; `work` when nothing is left.
#[must_use]
pub fn slug(title: &str) -> String {
    let lower = title.to_ascii_lowercase();
    let words = lower.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    let mut slug = String::new();
    for word in words {
        let gap = usize::from(!slug.is_empty());
        if slug.len() + gap + word.len() > MAX_BYTES {
            if slug.is_empty() {
                slug.push_str(&word[..MAX_BYTES]);
            }
            break;
        }
        if gap == 1 {
            slug.push('-');
        }
        slug.push_str(word);
    }
    if slug.is_empty() { "work".to_owned() } else { slug }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn title_becomes_words_joined_by_hyphens() {
        assert_eq!(slug("Fix the *login* page (again)!"), "fix-the-login-page-again");
        assert_eq!(slug("ü → ..//.lock"), "lock");
        assert_eq!(slug(" … "), "work");
    }

    proptest! {
        #[test]
        fn every_slug_is_short_ascii(title in "\\PC{0,120}") {
            let slug = slug(&title);
            prop_assert!(!slug.is_empty() && slug.len() <= MAX_BYTES);
            prop_assert!(!slug.starts_with('-') && !slug.ends_with('-') && !slug.contains("--"));
            prop_assert!(slug.chars().all(|c| matches!(c, 'a'..='z' | '0'..='9' | '-')));
        }
    }
}
