//! The commands of the quick start (`docs/quickstart.md`) from the first cluster to the restore, with the expected
//! output. The test has its own namespace and operators, so the steps with kind are left out.

use anyhow::{Result, ensure};
use e2e::guide::Guide;
use e2e::{Sandbox, scenario, step};

use crate::fixtures::root;

/// Opens a section of the quick start. The reader runs its commands in the root directory of the repository.
fn section(sandbox: &Sandbox, heading: &str) -> Result<Guide> {
    let namespace = format!("-n {} ", sandbox.namespace);
    let examples = format!("-f {}/examples/", root().display());
    let values = [
        ("-n etcd ", namespace.as_str()),
        ("-f examples/", examples.as_str()),
        // The reader ends this command with Ctrl+C.
        (" --watch", ""),
    ];
    Guide::open(&root().join("docs/quickstart.md"), heading, &values)
}

async fn run(sandbox: &Sandbox, guide: &mut Guide, expected: &[&str]) -> Result<()> {
    let printed = guide.run(&sandbox.env).await?;
    println!("{printed}");
    for text in expected {
        ensure!(printed.contains(text), "{text:?} is missing: {printed}");
    }
    Ok(())
}

async fn follow(sandbox: &Sandbox) -> Result<()> {
    let mut guide = section(sandbox, "4. Create an etcd cluster")?;
    let create = run(
        sandbox,
        &mut guide,
        &["condition met", "True", "pod/", "persistentvolumeclaim/"],
    );
    step("create a cluster", create).await?;
    let mut guide = section(sandbox, "5. Write and read a key")?;
    run(sandbox, &mut guide, &["OK\nhello\nworld\n"]).await?;
    let mut guide = section(sandbox, "6. Lose a member with its data")?;
    run(sandbox, &mut guide, &["deleted"]).await?;
    sandbox
        .await_members("example-etcd-cluster-durable", 3)
        .await?;
    run(sandbox, &mut guide, &["hello\nworld\n", "MemberRemoved"]).await?;
    let mut guide = section(sandbox, "7. Make a backup")?;
    let backup = run(sandbox, &mut guide, &["true", "pvc://backups/etcd/example"]);
    step("make a backup", backup).await?;
    let mut guide = section(sandbox, "8. Undo a mistake")?;
    let restore = run(sandbox, &mut guide, &["OK\n", "true", "hello\nworld\n"]);
    step("restore the backup", restore).await
}

/// This test runs only with `--full`: it has not passed on a testbed yet.
mod full {
    use super::*;

    #[tokio::test]
    async fn commands_of_quick_start_print_expected_output() {
        scenario("quick_start", async |sandbox| follow(sandbox).await).await;
    }
}
