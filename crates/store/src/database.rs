//! Where the store is kept: a file, or a PostgreSQL server. Reads and shows addresses; connects nowhere.

use std::{
    fmt,
    path::{Path, PathBuf},
    str::FromStr,
};

use harvest_proto::Secret;

// What the driver understands after the `?`. It would ignore anything else, and write it to the log.
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

/// The address of a store: `sqlite:PATH` or `postgres://USER:PASSWORD@HOST/DATABASE`. Shows itself without
/// the password.
#[derive(Clone, PartialEq, Eq)]
pub struct DatabaseUrl(pub(crate) Place);

#[derive(Clone, PartialEq, Eq)]
pub(crate) enum Place {
    File(PathBuf),
    Postgres(Secret<String>),
}

/// Why an address cannot be used. Never repeats it: there may be a password in it.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum DatabaseUrlError {
    /// Neither kind of address.
    #[error("it begins neither with `sqlite:` nor with `postgres://`")]
    Scheme,
    /// `sqlite:` without a file.
    #[error("`sqlite:` needs the path of a file")]
    NoFile,
    /// It is no URL.
    #[error(
        "it is not a valid URL; in a password, anything but letters and digits is written as `%` and two digits"
    )]
    Url,
    /// A parameter nobody knows.
    #[error("it has the unknown parameter `{name}`")]
    Parameter {
        /// Its name.
        name: String,
    },
}

impl DatabaseUrl {
    /// A file.
    #[must_use]
    pub fn file(path: &Path) -> Self {
        Self(Place::File(path.to_owned()))
    }
}

impl FromStr for DatabaseUrl {
    type Err = DatabaseUrlError;

    fn from_str(text: &str) -> Result<Self, DatabaseUrlError> {
        if let Some(path) = text.strip_prefix("sqlite:") {
            let path = path.strip_prefix("//").unwrap_or(path);
            // In memory it would forget everything, and every connection would have one of its own.
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
        Ok(Self(Place::Postgres(Secret::new(text.to_owned()))))
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
            Place::File(path) => write!(out, "sqlite:{}", path.display()),
            Place::Postgres(url) => {
                let rest = url.expose().split_once("://").map_or("", |(_, rest)| rest);
                let shown = rest.split(['?', '#']).next().unwrap_or("");
                // A password may hold an `@` that somebody forgot to escape: the last one counts.
                match shown.rsplit_once('@') {
                    Some((user, place)) => {
                        write!(out, "postgres://{}@{place}", user.split(':').next().unwrap_or(""))
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
    fn an_address_shows_itself_without_its_password() {
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
    fn a_file_is_taken_as_it_is_written() {
        assert_eq!(shown("sqlite:/a b/100%.db"), "sqlite:/a b/100%.db");
        assert_eq!(shown("sqlite:///var/h.db"), "sqlite:/var/h.db");
        assert_eq!(shown("sqlite:h.db"), "sqlite:h.db");
    }

    #[test]
    fn what_cannot_be_used_is_refused_without_being_repeated() {
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
