//! Prepares every SQL statement of the source on both databases, also those that no test runs.
//! Values bound with a wrong type are only found by running a statement.

use std::path::{Path, PathBuf};

use sqlx::Executor;

use crate::test_store::{TestDatabase, TestStore, on_both};

on_both! { every_statement_is_valid }

async fn every_statement_is_valid(test: TestStore) {
    let mut connection = test.database.raw().await;
    let mut checked = 0;
    for file in sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src")) {
        for sql in statements(&std::fs::read_to_string(&file).unwrap()) {
            let only_postgres = ["pg_", "current_setting"].iter().any(|word| sql.contains(word));
            if only_postgres && matches!(test.database, TestDatabase::File(_)) {
                continue;
            }
            checked += 1;
            let text = sqlx::SqlSafeStr::into_sql_str(sqlx::AssertSqlSafe(sql.clone()));
            let prepared = (&mut connection).prepare(text).await;
            assert!(prepared.is_ok(), "{}: {sql}\n{:?}", file.display(), prepared.err());
        }
    }
    assert!(checked > 60, "only {checked} statements were found");
}

fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        if entry.is_dir() {
            found.extend(sources(&entry));
        } else if entry.extension().is_some_and(|extension| extension == "rs") {
            found.push(entry);
        }
    }
    found
}

/// The SQL statements of a file, with its constants inserted.
fn statements(source: &str) -> Vec<String> {
    let code = source.split("#[cfg(test)]").next().unwrap_or(source);
    let constant = |name: &str| {
        let after = code.split_once(&format!("const {name}: &str ="))?.1;
        literals(after).into_iter().next()
    };
    let begins = |text: &str| {
        let words = ["SELECT ", "INSERT INTO ", "UPDATE ", "DELETE FROM ", "{SELECT}"];
        words.iter().any(|word| text.starts_with(word))
    };
    let whole = |text: String| match constant("SELECT") {
        Some(select) => text.replace("{SELECT}", &select),
        None => text,
    };
    let all = literals(code).into_iter().filter(|text| begins(text)).map(whole);
    // Composed statements are covered by the tests that run them.
    all.filter(|text| !text.contains('{')).collect()
}

/// String literals outside of comments.
fn literals(code: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut rest = code;
    while let Some(at) = rest.find(['"', '/', '\'']) {
        let from = &rest[at..];
        if from.starts_with("//") {
            rest = from.split_once('\n').map_or("", |(_, after)| after);
        } else if let Some(after) = from.strip_prefix("'\"'") {
            rest = after;
        } else if let Some(text) = from.strip_prefix('"') {
            let mut end = 0;
            while !text[end..].starts_with('"') {
                let step = if text[end..].starts_with('\\') { 2 } else { 1 };
                end += step;
                while !text.is_char_boundary(end) {
                    end += 1;
                }
            }
            found.push(joined(&text[..end]));
            rest = &text[end + 1..];
        } else {
            rest = &from[1..];
        }
    }
    found
}

/// Joins continued lines, as Rust does.
fn joined(text: &str) -> String {
    let mut parts = text.split("\\\n");
    let first = parts.next().unwrap_or("").to_owned();
    parts.fold(first, |whole, part| whole + part.trim_start())
}
