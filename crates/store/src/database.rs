//! Database URLs: parsing, and printing without the password. Connects to nothing.

use std::{
    fmt,
    path::{Path, PathBuf},
    str::FromStr,
};

use harvest_proto::Secret;

// Parameters the driver knows. It would ignore any other, and write it to the log.
const PARAMETERS: [&str; 13] = [
    "sslmode",
    "sslrootcert",
    "sslcert",
    "sslkey",
    "statement-cache-capacity",
    "host",
    "hostaddr",
    "port",
    "dbname",
    "user",
    "password",
    "application_name",
    "options",
];

/// URL of a database: `sqlite:PATH` or `postgres://USER:PASSWORD@HOST/DATABASE`. Printed without
/// the password.
#[derive(Clone, PartialEq, Eq)]
pub struct DatabaseUrl(pub(crate) Location);

#[derive(Clone, PartialEq, Eq)]
pub(crate) enum Location {
    File(PathBuf),
    Postgres(Secret<String>),
}

/// Why a URL is invalid. The URL is not part of the message: it may contain a password.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum DatabaseUrlError {
    #[error("the database URL must start with `sqlite:` or `postgres://`")]
    Scheme,
    #[error("`sqlite:` needs the path of a file")]
    NoFile,
    #[error(
        "the database URL is invalid; in a password, write special characters as `%` and two hex digits"
    )]
    Url,
    #[error("the database URL has the unknown parameter `{name}`")]
    Parameter { name: String },
}

impl DatabaseUrl {
    #[must_use]
    pub fn file(path: &Path) -> Self {
        Self(Location::File(path.to_owned()))
    }

    /// The file; `None` for a database on a server.
    #[must_use]
    pub fn file_path(&self) -> Option<&Path> {
        match &self.0 {
            Location::File(path) => Some(path),
            Location::Postgres(_) => None,
        }
    }
}

impl FromStr for DatabaseUrl {
    type Err = DatabaseUrlError;

    fn from_str(text: &str) -> Result<Self, DatabaseUrlError> {
        if let Some(path) = text.strip_prefix("sqlite:") {
            let path = path.strip_prefix("//").unwrap_or(path);
            // An in-memory database would be lost at exit, and each connection would have its own.
            if path.is_empty() || path == ":memory:" {
                return Err(DatabaseUrlError::NoFile);
            }
            return Ok(Self::file(Path::new(path)));
        }
        let scheme =
            ["postgres://", "postgresql://"].into_iter().find(|scheme| text.starts_with(scheme));
        let rest =
            scheme.and_then(|scheme| text.strip_prefix(scheme)).ok_or(DatabaseUrlError::Scheme)?;
        for name in parameters(rest) {
            let known = name.split('[').next().unwrap_or(name);
            if !PARAMETERS.contains(&known) {
                return Err(DatabaseUrlError::Parameter { name: name.to_owned() });
            }
        }
        sqlx::postgres::PgConnectOptions::from_str(text).map_err(|_| DatabaseUrlError::Url)?;
        Ok(Self(Location::Postgres(Secret::new(text.to_owned()))))
    }
}

fn parameters(rest: &str) -> impl Iterator<Item = &str> {
    let query = rest.split_once('?').map_or("", |(_, query)| query);
    query
        .split('&')
        .filter(|pair| !pair.is_empty())
        .map(|pair| pair.split('=').next().unwrap_or(pair))
}

impl fmt::Display for DatabaseUrl {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Location::File(path) => write!(out, "sqlite:{}", path.display()),
            Location::Postgres(url) => {
                let rest = url.expose().split_once("://").map_or("", |(_, rest)| rest);
                let shown = rest.split(['?', '#']).next().unwrap_or("");
                // A password may contain an unescaped `@`, so the last `@` ends it.
                match shown.rsplit_once('@') {
                    Some((user, host)) => {
                        write!(out, "postgres://{}@{host}", user.split(':').next().unwrap_or(""))
                    }
                    None => write!(out, "postgres://{shown}"),
                }
            }
        }
    }
}

impl fmt::Debug for DatabaseUrl {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(text: &str) -> String {
        text.parse::<DatabaseUrl>().unwrap().to_string()
    }

    #[test]
    fn url_is_printed_without_password() {
        assert_eq!(
            shown("postgres://ada:s3cret@db.example:5433/harvest"),
            "postgres://ada@db.example:5433/harvest"
        );
        assert_eq!(
            shown("postgresql://ada@db/harvest?password=s3cret"),
            "postgres://ada@db/harvest"
        );
        assert_eq!(shown("postgres://db/harvest?host=/run/pg"), "postgres://db/harvest");
        let url: DatabaseUrl = "postgres://ada:s3cret@db/harvest".parse().unwrap();
        assert!(!format!("{url:?} {url:#?}").contains("s3cret"));
    }

    #[test]
    fn sqlite_path_is_taken_literally() {
        assert_eq!(shown("sqlite:/a b/100%.db"), "sqlite:/a b/100%.db");
        assert_eq!(shown("sqlite:///var/h.db"), "sqlite:/var/h.db");
        assert_eq!(shown("sqlite:h.db"), "sqlite:h.db");
    }

    #[test]
    fn invalid_url_is_refused_without_echoing_it() {
        for (text, why) in [
            ("mysql://u:s3cret@h/d", DatabaseUrlError::Scheme),
            ("s3cret", DatabaseUrlError::Scheme),
            ("sqlite:", DatabaseUrlError::NoFile),
            ("sqlite::memory:", DatabaseUrlError::NoFile),
            ("postgres://u:s3cret@h:port/d", DatabaseUrlError::Url),
            (
                "postgres://u@h/d?pasword=s3cret",
                DatabaseUrlError::Parameter { name: "pasword".into() },
            ),
        ] {
            let error = text.parse::<DatabaseUrl>().unwrap_err();
            assert_eq!(error, why, "{text}");
            assert!(!format!("{error} {error:?}").contains("s3cret"));
        }
    }
}
