//! The language of the code: one name per type, the field's terms, short test names, comments that
//! say something.

use std::{collections::BTreeMap, fs, path::PathBuf};

use super::source::{crates, identifier, root, rust_files, visible_item};

/// Words the code no longer uses for a mechanism, in names, comments and messages.
const RETIRED: &[&str] = &[
    "bury",
    "cradle",
    "furnish",
    "household",
    "mishap",
    "mishaps",
    "nursery",
    "rouse",
    "usher",
    "vigil",
];

/// Words that hide the subject of a sentence, in comments.
const VAGUE: &[&str] = &["anybody", "everybody", "nobody", "somebody", "whoever"];

const MOST_WORDS_IN_A_TEST_NAME: usize = 8;

/// Every Rust file with its path relative to the root.
fn sources() -> Vec<(PathBuf, String)> {
    let files = ["crates", "tests", "bench"].map(|folder| rust_files(&root().join(folder)));
    let read = |file: PathBuf| {
        let text = fs::read_to_string(&file).unwrap();
        (file.strip_prefix(root()).unwrap().to_owned(), text)
    };
    // This file quotes the words it looks for.
    files.into_iter().flatten().map(read).filter(|(file, _)| !file.ends_with(file!())).collect()
}

/// The text of a comment that has a line of its own.
fn comment(line: &str) -> Option<&str> {
    line.trim_start().strip_prefix("//").map(|text| text.trim_start_matches(['/', '!']).trim())
}

/// A line's words in lower case; `snake_case` and `CamelCase` names are taken apart.
fn words(line: &str) -> Vec<String> {
    let mut all = vec![String::new()];
    let mut previous_is_lower = false;
    for character in line.chars() {
        if !character.is_alphabetic() || (character.is_uppercase() && previous_is_lower) {
            all.push(String::new());
        }
        if character.is_alphabetic() {
            all.last_mut().expect("one is there").extend(character.to_lowercase());
        }
        previous_is_lower = character.is_lowercase();
    }
    all.retain(|word| !word.is_empty());
    all
}

#[test]
fn type_names_are_unique_per_crate() {
    for name in crates() {
        let mut homes: BTreeMap<String, PathBuf> = BTreeMap::new();
        for file in rust_files(&root().join(format!("crates/{name}/src"))) {
            let text = fs::read_to_string(&file).unwrap();
            for item in text.lines().filter_map(visible_item) {
                let kinds = ["struct ", "enum ", "trait ", "union ", "type "];
                let Some(rest) = kinds.iter().find_map(|kind| item.strip_prefix(kind)) else {
                    continue;
                };
                // A macro's parameter.
                if rest.starts_with('$') {
                    continue;
                }
                let other = homes.insert(identifier(rest).to_owned(), file.clone());
                assert!(
                    other.is_none(),
                    "`{}` is declared in {} and in {}",
                    identifier(rest),
                    file.display(),
                    other.unwrap_or_default().display()
                );
            }
        }
    }
}

#[test]
fn retired_words_do_not_return() {
    let mut found = Vec::new();
    for (file, text) in sources() {
        for (number, line) in text.lines().enumerate() {
            for word in words(line) {
                let vague = comment(line).is_some() && VAGUE.contains(&word.as_str());
                if vague || RETIRED.contains(&word.as_str()) {
                    found.push(format!("{}:{}: `{word}`", file.display(), number + 1));
                }
            }
        }
    }
    assert!(found.is_empty(), "say it plainly:\n{}", found.join("\n"));
}

#[test]
fn test_names_have_at_most_eight_words() {
    let mut found = Vec::new();
    for (file, text) in sources() {
        let mut is_test = false;
        for line in text.lines().map(str::trim_start) {
            if line.starts_with("#[test]") || line.starts_with("#[tokio::test") {
                is_test = true;
            } else if let Some((_, rest)) = line.split_once("fn ").filter(|_| is_test) {
                let name = identifier(rest);
                if name.split('_').count() > MOST_WORDS_IN_A_TEST_NAME {
                    found.push(format!("{}: {name}", file.display()));
                }
                is_test = false;
            }
        }
    }
    assert!(found.is_empty(), "test names of more than eight words:\n{}", found.join("\n"));
}

#[test]
fn doc_comments_have_more_than_one_word() {
    let mut found = Vec::new();
    for (file, text) in sources() {
        let is_doc = |line: Option<&str>| line.is_some_and(|line| line.trim().starts_with("///"));
        let lines: Vec<&str> = text.lines().collect();
        for (index, line) in lines.iter().enumerate().filter(|(_, line)| is_doc(Some(line))) {
            let alone = !is_doc(index.checked_sub(1).map(|before| lines[before]))
                && !is_doc(lines.get(index + 1).copied());
            let said = comment(line).unwrap_or_default();
            if alone && !said.trim_end_matches('.').contains([' ', '`', '[']) {
                found.push(format!("{}:{}: {said}", file.display(), index + 1));
            }
        }
    }
    assert!(found.is_empty(), "doc comments that say nothing:\n{}", found.join("\n"));
}

#[test]
fn comments_fit_100_columns() {
    let mut found = Vec::new();
    for (file, text) in sources() {
        for (number, line) in text.lines().enumerate() {
            // A row of a table cannot be wrapped.
            let wraps = comment(line).is_some_and(|text| !text.starts_with('|'));
            if wraps && line.chars().count() > 100 {
                found.push(format!("{}:{}", file.display(), number + 1));
            }
        }
    }
    assert!(found.is_empty(), "comments over 100 columns:\n{}", found.join("\n"));
}

#[test]
fn glossary_words_occur_in_the_code() {
    let glossary = fs::read_to_string(root().join("docs/glossary.md")).unwrap();
    let code: String = sources().into_iter().map(|(_, text)| text).collect::<String>();
    let code = code.to_lowercase();
    let rows = glossary.lines().filter(|line| line.starts_with("| ") && !line.contains("---"));
    for row in rows.skip(1) {
        let term = row.trim_start_matches("| ").split(" |").next().unwrap().to_lowercase();
        assert!(code.contains(&term), "the glossary has `{term}`, the code does not");
    }
}
