//! Parsing of valid recipes, and the errors of invalid ones.

use super::*;

fn parse(text: &str) -> Result<Recipe, RecipeError> {
    Recipe::parse(text, Path::new("."))
}

fn step(line: &str) -> Result<Recipe, RecipeError> {
    parse(&format!("name = \"x\"\nfrom = \"base\"\n[[step]]\n{line}"))
}

#[test]
fn all_parts_of_a_recipe_are_parsed() {
    let text = r#"
        name = "tools"
        from = { debian = "bookworm", include = ["git", "curl", "git"] }
        [[step]]
        apt = ["jq"]
        [[step]]
        copy = { from = "files", to = "/app" }
        [[step]]
        env = { LANG = "C.UTF-8" }
        [[step]]
        user = "harvest"
        [[step]]
        workdir = "/workspace"
    "#;
    let recipe = parse(text).unwrap();
    let include = vec!["curl".to_owned(), "git".to_owned()];
    assert_eq!(recipe.from, Base::Debian { suite: "bookworm".to_owned(), include });
    assert_eq!(recipe.steps.len(), 5);
    assert_eq!(recipe.steps[1], RecipeStep::Copy { from: "files".into(), to: "/app".into() });
}

#[test]
fn unknown_key_suggests_the_nearest_known_one() {
    let message = |result: Result<Recipe, RecipeError>| result.unwrap_err().to_string();
    assert_eq!(
        message(parse("nmae = \"x\"")),
        "unknown key `nmae` in the recipe; did you mean `name`?"
    );
    assert_eq!(
        message(step("workdri = \"/\"")),
        "unknown key `workdri` in step 1; did you mean `workdir`?"
    );
    assert_eq!(
        message(parse("name = \"x\"\nfrom = { debain = \"bookworm\" }")),
        "unknown key `debain` in `from`; did you mean `debian`?"
    );
}

#[test]
fn from_takes_exactly_one_base() {
    let from =
        |table: &str| parse(&format!("name = \"x\"\nfrom = {table}")).map(|recipe| recipe.from);
    assert_eq!(from("{ tar = \"a.tar.gz\" }").unwrap(), Base::Tar("a.tar.gz".into()));
    assert_eq!(from("{ oci = \"r.test/a:1\" }").unwrap(), Base::Oci("r.test/a:1".to_owned()));
    for wrong in [
        "{ tar = \"a\", folder = \"b\" }",
        "{ debian = \"bookworm\", oci = \"r.test/a\" }",
        "{ oci = \"debian\" }",
        "{ include = [\"a\"] }",
    ] {
        assert!(from(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn invalid_values_are_refused() {
    for line in [
        "apt = []",
        "apt = [\"-o=x\"]",
        "npm = \"one\"",
        "run = 1",
        "copy = { from = \"../../etc\", to = \"/x\" }",
        "copy = { from = \"/etc\", to = \"/x\" }",
        "copy = { from = \"a\", to = \"x\" }",
        "copy = { from = \"a\", to = \"/x/../../y\" }",
        "env = { \"A=B\" = \"c\" }",
        "user = \"somebody\"",
        "workdir = \"relative\"",
        "run = \"a\"\napt = [\"b\"]",
        "",
    ] {
        assert!(step(line).is_err(), "{line}");
    }
    for name in ["", "../x", "A", ".x", "a/b"] {
        assert!(parse(&format!("name = \"{name}\"\nfrom = \"base\"")).is_err(), "{name}");
    }
}

#[test]
fn recipe_says_what_its_steps_reach() {
    let parse = |line: &str| {
        let recipe = Recipe::parse(&format!("name = \"x\"\nfrom = \"y\"\n{line}"), Path::new("."));
        recipe.map(|recipe| (recipe.host_network, recipe.allow))
    };
    assert_eq!(parse("").unwrap(), (false, vec![]));
    assert_eq!(parse("network = \"host\"").unwrap(), (true, vec![]));
    let names = vec!["a.example.org:8443".to_owned()];
    assert_eq!(parse("allow = [\"a.example.org:8443\"]").unwrap(), (false, names));
    for wrong in ["network = \"none\"", "network = true", "allow = \"a.org\"", "allow = [1]"] {
        assert!(parse(wrong).is_err(), "{wrong}");
    }
}
