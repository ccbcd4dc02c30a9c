//! `docs/requirements.md`: every item has a row, and every test that a row names exists. Whether a
//! test is about its item is for reviewers.

use std::{collections::BTreeMap, fs, path::PathBuf};

use super::source::root;

const ITEMS: usize = 337;

const STATUSES: [&str; 4] = ["shown", "different", "Modal", "open"];

/// A row of the page: what says whether an item is done.
#[derive(Debug, PartialEq)]
struct Requirement {
    number: usize,
    status: String,
    text: String,
}

/// The numbered rows of a page. A cell may contain `\|`.
fn requirements(page: &str) -> Vec<Requirement> {
    let row = |line: &str| {
        let line = line.strip_prefix("| ")?.trim_end_matches('|').replace("\\|", "\u{1}");
        let cells: Vec<_> = line.split('|').map(|cell| cell.trim().replace('\u{1}', "|")).collect();
        let [number, _, status, text] = &cells[..] else { return None };
        // Other tables of the page have other columns.
        STATUSES.contains(&status.as_str()).then_some(())?;
        Some(Requirement {
            number: number.parse().ok()?,
            status: status.clone(),
            text: text.clone(),
        })
    };
    page.lines().filter_map(row).collect()
}

/// The files and names in `` `FILE`: `NAME` ``.
fn evidence(text: &str) -> Vec<(&str, &str)> {
    let spans: Vec<&str> = text.split('`').collect();
    // Code is at odd places, what separates it at even ones.
    let pair = |at: usize| (spans[at + 1] == ": ").then(|| (spans[at], spans[at + 2]));
    (1..spans.len().saturating_sub(2)).step_by(2).filter_map(pair).collect()
}

fn path(file: &str) -> PathBuf {
    let in_root =
        ["crates/", "tests/", "clients/", "images/", "docs/", ".ci/", "Makefile", "CONTR"];
    let folder = if in_root.iter().any(|start| file.starts_with(start)) {
        ""
    } else if file.starts_with("test_") {
        "clients/python/tests"
    } else {
        "tests/e2e/tests/promises"
    };
    root().join(folder).join(file)
}

/// Whether a file has a test of this name; of other files than programs, whether it has the text.
fn has(file: &str, text: &str, name: &str) -> bool {
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let declared = |line: &str| {
        let line = line.trim_start_matches("pub ").trim_start_matches("async ");
        let rest = line.strip_prefix("fn ").or_else(|| line.strip_prefix("def "));
        rest.and_then(|rest| rest.strip_prefix(name)).is_some_and(|rest| rest.starts_with('('))
    };
    match file.rsplit('.').next() {
        Some("py") if name.starts_with("test_") => lines.iter().any(|line| declared(line)),
        Some("rs") => lines.iter().enumerate().any(|(at, line)| {
            let attributes = lines[..at].iter().rev().take_while(|line| line.starts_with("#["));
            // Tests of both databases are listed in a macro.
            let listed = || lines.contains(&format!("{name},").as_str());
            declared(line) && (attributes.clone().any(|line| line.contains("test")) || listed())
        }),
        _ => text.contains(name),
    }
}

#[test]
fn every_requirement_has_evidence() {
    let page = fs::read_to_string(root().join("docs/requirements.md")).unwrap();
    let rows = requirements(&page);
    let numbers: Vec<usize> = rows.iter().map(|row| row.number).collect();
    assert_eq!(numbers, (1..=ITEMS).collect::<Vec<_>>());
    let mut wrong = Vec::new();
    let mut counts = BTreeMap::new();
    for Requirement { number, status, text } in &rows {
        *counts.entry(status.as_str()).or_insert(0) += 1;
        let shown = !evidence(text).is_empty();
        if status == "shown" && !shown || status != "Modal" && text.is_empty() {
            wrong.push(format!("{number}: nothing shows it, or says what is missing"));
        }
    }
    for line in page.lines().filter(|line| line.starts_with('|')) {
        for (file, name) in evidence(&line.replace("\\|", "|")) {
            match fs::read_to_string(path(file)) {
                Ok(content) if has(file, &content, name) => {}
                Ok(_) => wrong.push(format!("`{file}` has no `{name}`: {line}")),
                Err(error) => wrong.push(format!("`{file}`: {error}: {line}")),
            }
        }
    }
    assert!(wrong.is_empty(), "docs/requirements.md:\n{}", wrong.join("\n"));
    for status in STATUSES {
        let count = format!("| {status} | {} |", counts.get(status).copied().unwrap_or(0));
        assert!(page.contains(&count), "the table on top of docs/requirements.md lacks `{count}`");
    }
}

#[test]
fn evidence_needs_an_existing_test() {
    let row = "| 7 | a \\| b | shown | `a.rs`: `works`, `b.toml`: `x \\| y`, not `this` `one` |";
    let rows = requirements(&format!("| # | item |\n|---|---|\n{row}\n| shown | 1 | all |\n"));
    assert_eq!(rows.len(), 1);
    assert_eq!(evidence(&rows[0].text), [("a.rs", "works"), ("b.toml", "x | y")]);
    assert!(has("a.rs", "    #[tokio::test]\n    async fn works() {", "works"));
    assert!(has("a.rs", "on_both! {\n    works,\n}\nasync fn works(store: TestStore) {", "works"));
    assert!(!has("a.rs", "fn works() {", "works"), "not a test");
    assert!(!has("a.rs", "#[test]\nfn works_too() {", "works"));
    assert!(has("test_a.py", "async def test_it(client: Client) -> None:", "test_it"));
    assert!(!has("test_a.py", "# def test_it", "test_it"));
}
