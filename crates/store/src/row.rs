//! Between columns and our types: numbers are BIGINT, everything with a name is TEXT.

use std::str::FromStr;

use harvest_proto::Timestamp;
use serde::{Serialize, de::DeserializeOwned};
use sqlx::Row;

use crate::{DbRow, StoreError};

/// A value as the database has it.
fn get<'r, T>(row: &'r DbRow, column: &'static str) -> Result<T, StoreError>
where
    T: sqlx::Decode<'r, sqlx::Any> + sqlx::Type<sqlx::Any>,
{
    row.try_get(column).map_err(|error| match error {
        sqlx::Error::ColumnDecode { .. } => StoreError::Corrupt { column },
        other => StoreError::Database(other),
    })
}

/// A text.
pub(crate) fn text(row: &DbRow, column: &'static str) -> Result<String, StoreError> {
    get(row, column)
}

/// A text that may be absent.
pub(crate) fn optional(row: &DbRow, column: &'static str) -> Result<Option<String>, StoreError> {
    get(row, column)
}

/// Anything that prints and parses: an id.
pub(crate) fn parsed<T: FromStr>(row: &DbRow, column: &'static str) -> Result<T, StoreError> {
    text(row, column)?.parse().map_err(|_| StoreError::Corrupt { column })
}

/// The same, perhaps absent.
pub(crate) fn parsed_optional<T: FromStr>(
    row: &DbRow,
    column: &'static str,
) -> Result<Option<T>, StoreError> {
    optional(row, column)?
        .map(|text| text.parse().map_err(|_| StoreError::Corrupt { column }))
        .transpose()
}

/// A count, never negative.
pub(crate) fn count<T: TryFrom<i64>>(row: &DbRow, column: &'static str) -> Result<T, StoreError> {
    let number: i64 = get(row, column)?;
    T::try_from(number).map_err(|_| StoreError::Corrupt { column })
}

/// A count that may be absent.
pub(crate) fn count_optional<T: TryFrom<i64>>(
    row: &DbRow,
    column: &'static str,
) -> Result<Option<T>, StoreError> {
    let number: Option<i64> = get(row, column)?;
    number.map(|number| T::try_from(number).map_err(|_| StoreError::Corrupt { column })).transpose()
}

/// A point in time.
pub(crate) fn time(row: &DbRow, column: &'static str) -> Result<Timestamp, StoreError> {
    Ok(Timestamp::from_millis(get(row, column)?))
}

/// A point in time that may be absent.
pub(crate) fn time_optional(
    row: &DbRow,
    column: &'static str,
) -> Result<Option<Timestamp>, StoreError> {
    let millis: Option<i64> = get(row, column)?;
    Ok(millis.map(Timestamp::from_millis))
}

/// JSON kept as text.
pub(crate) fn json<T: DeserializeOwned>(
    row: &DbRow,
    column: &'static str,
) -> Result<T, StoreError> {
    serde_json::from_str(&text(row, column)?).map_err(|_| StoreError::Corrupt { column })
}

/// JSON kept as text, perhaps absent.
pub(crate) fn json_optional<T: DeserializeOwned>(
    row: &DbRow,
    column: &'static str,
) -> Result<Option<T>, StoreError> {
    optional(row, column)?
        .map(|text| serde_json::from_str(&text).map_err(|_| StoreError::Corrupt { column }))
        .transpose()
}

/// A word such as `needs_input`, by the name serde gives the variant.
pub(crate) fn word<T: DeserializeOwned>(
    row: &DbRow,
    column: &'static str,
) -> Result<T, StoreError> {
    from_word(text(row, column)?, column)
}

/// A word that may be absent.
pub(crate) fn word_optional<T: DeserializeOwned>(
    row: &DbRow,
    column: &'static str,
) -> Result<Option<T>, StoreError> {
    optional(row, column)?.map(|text| from_word(text, column)).transpose()
}

fn from_word<T: DeserializeOwned>(text: String, column: &'static str) -> Result<T, StoreError> {
    serde_json::from_value(serde_json::Value::String(text))
        .map_err(|_| StoreError::Corrupt { column })
}

/// The word of a variant.
pub(crate) fn to_word(value: &impl Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(word)) => word,
        other => unreachable!("only enums without data are kept as words, not {other:?}"),
    }
}

/// What people and programs wrote, without zero bytes, which PostgreSQL cannot keep in a text. They become
/// the sign that is printed for them.
pub(crate) fn plain(text: String) -> String {
    if text.contains('\0') { text.replace('\0', "\u{2400}") } else { text }
}

/// JSON as text.
pub(crate) fn to_json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("our records hold only maps with text keys")
}

/// A count for a BIGINT column.
pub(crate) fn bigint(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}
