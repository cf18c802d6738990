package dev.runnerd.client;

import org.junit.runner.Description;
import org.junit.runner.JUnitCore;
import org.junit.runner.Result;
import org.junit.runner.notification.Failure;
import org.junit.runner.notification.RunListener;

/** Runs the contract tests without Maven and prints the outcome of each; JUnit's own runner hides what is skipped. */
public final class ContractRun extends RunListener {
  private String outcome;

  public static void main(String[] arguments) {
    JUnitCore core = new JUnitCore();
    core.addListener(new ContractRun());
    Result result = core.run(ContractTest.class);
    System.out.printf("%d tests, %d failed%n", result.getRunCount(), result.getFailureCount());
    System.exit(result.wasSuccessful() ? 0 : 1);
  }

  @Override
  public void testStarted(Description test) {
    outcome = "PASS";
  }

  @Override
  public void testFailure(Failure failure) {
    outcome = "FAIL";
    System.out.println(failure.getTrace());
  }

  @Override
  public void testAssumptionFailure(Failure failure) {
    outcome = "SKIP";
  }

  @Override
  public void testFinished(Description test) {
    System.out.printf("--- %s: %s%n", outcome, test.getMethodName());
  }
}
