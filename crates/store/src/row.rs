//! Conversion between columns and Rust types: numbers are BIGINT, everything else is TEXT.

use std::str::FromStr;

use harvest_proto::{Timestamp, bridge::Author, event::Usage};
use serde::{Serialize, de::DeserializeOwned};
use sqlx::Row;

use crate::{DbRow, StoreError};

/// The largest number from outside that is stored: 65,536 of them can be added without overflow.
pub(crate) const MAX_COUNT: i64 = i64::MAX >> 16;

fn get<'r, T>(row: &'r DbRow, column: &'static str) -> Result<T, StoreError>
where
    T: sqlx::Decode<'r, sqlx::Any> + sqlx::Type<sqlx::Any>,
{
    row.try_get(column).map_err(|error| match error {
        sqlx::Error::ColumnDecode { .. } => StoreError::Corrupt { column },
        other => StoreError::Database(other),
    })
}

pub(crate) fn text(row: &DbRow, column: &'static str) -> Result<String, StoreError> {
    get(row, column)
}

pub(crate) fn optional(row: &DbRow, column: &'static str) -> Result<Option<String>, StoreError> {
    get(row, column)
}

/// An id or another type that is stored as it prints.
pub(crate) fn parsed<T: FromStr>(row: &DbRow, column: &'static str) -> Result<T, StoreError> {
    text(row, column)?.parse().map_err(|_| StoreError::Corrupt { column })
}

pub(crate) fn parsed_optional<T: FromStr>(
    row: &DbRow,
    column: &'static str,
) -> Result<Option<T>, StoreError> {
    optional(row, column)?
        .map(|text| text.parse().map_err(|_| StoreError::Corrupt { column }))
        .transpose()
}

pub(crate) fn count<T: TryFrom<i64>>(row: &DbRow, column: &'static str) -> Result<T, StoreError> {
    let number: i64 = get(row, column)?;
    T::try_from(number).map_err(|_| StoreError::Corrupt { column })
}

pub(crate) fn count_optional<T: TryFrom<i64>>(
    row: &DbRow,
    column: &'static str,
) -> Result<Option<T>, StoreError> {
    let number: Option<i64> = get(row, column)?;
    number.map(|number| T::try_from(number).map_err(|_| StoreError::Corrupt { column })).transpose()
}

pub(crate) fn time(row: &DbRow, column: &'static str) -> Result<Timestamp, StoreError> {
    Ok(Timestamp::from_millis(get(row, column)?))
}

pub(crate) fn time_optional(
    row: &DbRow,
    column: &'static str,
) -> Result<Option<Timestamp>, StoreError> {
    let millis: Option<i64> = get(row, column)?;
    Ok(millis.map(Timestamp::from_millis))
}

pub(crate) fn json<T: DeserializeOwned>(
    row: &DbRow,
    column: &'static str,
) -> Result<T, StoreError> {
    serde_json::from_str(&text(row, column)?).map_err(|_| StoreError::Corrupt { column })
}

pub(crate) fn json_optional<T: DeserializeOwned>(
    row: &DbRow,
    column: &'static str,
) -> Result<Option<T>, StoreError> {
    optional(row, column)?
        .map(|text| serde_json::from_str(&text).map_err(|_| StoreError::Corrupt { column }))
        .transpose()
}

/// An enum variant, stored under its serde name, such as `needs_input`.
pub(crate) fn enum_name<T: DeserializeOwned>(
    row: &DbRow,
    column: &'static str,
) -> Result<T, StoreError> {
    from_enum_name(text(row, column)?, column)
}

pub(crate) fn enum_name_optional<T: DeserializeOwned>(
    row: &DbRow,
    column: &'static str,
) -> Result<Option<T>, StoreError> {
    optional(row, column)?.map(|text| from_enum_name(text, column)).transpose()
}

fn from_enum_name<T: DeserializeOwned>(
    text: String,
    column: &'static str,
) -> Result<T, StoreError> {
    serde_json::from_value(serde_json::Value::String(text))
        .map_err(|_| StoreError::Corrupt { column })
}

pub(crate) fn author(row: &DbRow) -> Result<Author, StoreError> {
    Ok(Author { name: text(row, "author_name")?, email: text(row, "author_email")? })
}

pub(crate) fn usage(row: &DbRow) -> Result<Usage, StoreError> {
    Ok(Usage {
        input_tokens: count(row, "input_tokens")?,
        output_tokens: count(row, "output_tokens")?,
        cache_read_tokens: count(row, "cache_read_tokens")?,
        cache_write_tokens: count(row, "cache_write_tokens")?,
    })
}

pub(crate) fn to_enum_name(value: &impl Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(name)) => name,
        other => unreachable!("only enums without data are stored by name, not {other:?}"),
    }
}

/// Replaces NUL characters by their visible symbol: PostgreSQL cannot store NUL in a text.
pub(crate) fn replace_nul(text: String) -> String {
    if text.contains('\0') { text.replace('\0', "\u{2400}") } else { text }
}

pub(crate) fn to_json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("all stored types have text keys")
}

/// Reads all rows. A damaged row is logged and left out: it must not hide the others.
pub(crate) fn readable<T, C: FromIterator<T>>(
    rows: &[DbRow],
    read: impl Fn(&DbRow) -> Result<T, StoreError>,
) -> Result<C, StoreError> {
    let report = |row: &DbRow, column| {
        tracing::error!(column, row = key(row), "skipped a damaged row of the database");
    };
    rows.iter()
        .filter_map(|row| match read(row) {
            Err(StoreError::Corrupt { column }) => {
                report(row, column);
                None
            }
            other => Some(other),
        })
        .collect()
}

/// The identifying texts of a row, for the log.
fn key(row: &DbRow) -> String {
    let columns = ["session", "id", "name", "kind", "snapshot"];
    let texts = columns.iter().filter_map(|column| optional(row, column).ok().flatten());
    texts.collect::<Vec<_>>().join(" ")
}

/// A number from outside, at most [`MAX_COUNT`].
pub(crate) fn bounded(number: u64) -> i64 {
    bigint(number).min(MAX_COUNT)
}

pub(crate) fn bigint(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}
